"""The race page in a real browser: points grow side by side, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

import retrieval_copy
from sot_chains.serving import Copying
from tests.sot_chains.fakes import QUESTION, PacedChatModel, answer_to
from tests.sot_chains.serving.running import served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,  # a browser takes seconds to start, and longer beside other tests
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
ROOT = Path(__file__).parents[3]
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PHONE = {"width": 375, "height": 720}
# Notes which point of Skeleton-of-Thought each piece of text belongs to.
WATCH = """() => {
  window.grown = [];
  new MutationObserver((changes) => {
    for (const change of changes) {
      const block = change.target.closest?.(".lane.sot .block");
      if (block && change.target.classList.contains("text"))
        window.grown.push(block.querySelector("h3")?.textContent);
    }
  }).observe(document.body, { childList: true, subtree: true });
}"""


class Visit:
    """A page in a browser, and what it asked for and complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.said: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(dialog.message))

    async def ask(self, url: str, question: str, *, seconds: float = 15) -> list[str | None]:
        """Asks with the keyboard alone; returns the points in the order in which their text came."""
        await self.page.goto(url)
        await self.page.wait_for_selector("html[data-ready=yes]")
        await self.page.evaluate(WATCH)
        await self.page.keyboard.press("Tab")
        await self.page.keyboard.type(question)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_selector("#share:not([hidden])", timeout=seconds * 1000)
        grown: list[str | None] = await self.page.evaluate("window.grown")
        return grown


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            await opened.close()


def _grew_in_parallel(grown: list[str | None]) -> bool:
    """Whether text was added to a point after text of another one. An introduction has no heading."""
    points = [point for point in grown if point]
    return len(list(groupby(points))) > len(set(points))


async def _fits(page: Any) -> bool:
    width = await page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    return bool(width[0] <= width[1])


def _with_folder() -> Copying:
    found = [Document("A dark room with less coffee is best.", metadata={"source": "sleep.md"})]
    retriever = RunnableLambda(lambda query: found)
    from_folder = partial(retrieval_copy.RetrievalCopyChain, retriever, min_citation_tokens=3)
    return Copying(retrieval_copy.cite, from_folder)


async def test_points_grow_side_by_side_and_the_run_is_shared(tmp_path: Path) -> None:
    model = PacedChatModel(pause=0.02)
    with served(model, copying=_with_folder()) as running:
        async with browser() as opened:
            visit = Visit(await opened.new_page(accept_downloads=True, viewport=PHONE))
            page = visit.page
            assert _grew_in_parallel(await visit.ask(running.url, QUESTION))
            assert await page.locator(".lane.sot .block").count() == 3
            assert await page.locator(".lane.sot .block .text").first.text_content() == (
                "Go to bed at the same time."
            )
            # The result is one sentence on the first screen, above the bars of all lanes.
            assert re.fullmatch(
                r"Point by point, all of it was there after \d+\.\d s instead of \d+\.\d s, .+ fas.+\.",
                await page.locator("#status").text_content() or "",
            )
            assert await page.locator("#race .bar").count() == 3
            status = await page.locator("#status").bounding_box()
            assert status
            assert status["y"] + status["height"] <= PHONE["height"]
            assert await page.locator(".lane.copy mark").first.text_content() == "with less coffee"
            assert await page.locator(".timeline svg").count() == 6
            rows = await page.locator(".figures tbody tr").all_text_contents()
            names = ["Plain decoding", "Skeleton-of-Thought", "Copying"]
            assert all(row.startswith(name) for row, name in zip(rows, names, strict=True))
            assert await _fits(page)
            light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            await page.emulate_media(color_scheme="dark")
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != light
            async with page.expect_download() as download:
                await page.locator("#link").press("Enter")
            saved = await (await download.value).path()
            shared = Visit(await opened.new_page())
            file = tmp_path / "run.html"
            shutil.copy(saved, file)
            await shared.page.goto(file.as_uri())
            assert await shared.page.locator(".timeline svg").count() == 6
            box = await shared.page.locator(".lane.sot").bounding_box()
            assert box
            assert box["width"] > 200
            assert shared.asked == [file.as_uri()]
            assert [url for url in visit.asked if not url.startswith((running.url, "data:", "blob:"))] == []
            assert visit.said == shared.said == []


async def test_what_a_model_writes_is_text_on_the_page() -> None:
    def evil(messages: Any) -> str:
        return answer_to(messages).replace("hours", f"hours {EVIL}").replace("curtains", EVIL)

    model = PacedChatModel(answer=lambda messages: evil(messages) if EVIL not in str(messages) else EVIL)
    with served(model) as running:
        async with browser() as opened:
            visit = Visit(await opened.new_page())
            await visit.ask(running.url, f"{EVIL} how do I sleep?")
            assert await visit.page.locator("#result img, #result script").count() == 0
            assert EVIL in (await visit.page.locator("#result").text_content() or "")
            assert visit.said == []


async def test_a_failure_is_shown_and_a_race_can_be_stopped() -> None:
    model = PacedChatModel(pause=0.3, fail=lambda messages: "broken" in str(messages))
    with served(model, api_key="sesame") as running:
        async with browser() as opened:
            page = Visit(await opened.new_page()).page
            await page.goto(running.url)
            await page.wait_for_selector("html[data-ready=yes]")
            await page.locator("#question").fill("Is it broken?")
            await page.locator("#ask").click()
            await page.get_by_text("It failed: the API key is missing").wait_for()
            assert await page.locator("#status.failed").count() == 1
            assert await page.locator(".track .time").all_text_contents() == ["did not begin"] * 2
            await page.locator("#key").fill("sesame")
            await page.locator("#ask").click()
            await page.get_by_text("It failed: the model failed").first.wait_for()
            await page.get_by_text("Skeleton-of-Thought failed.").wait_for()
            assert await page.locator("#status.failed").count() == 1
            await page.locator("#question").fill(QUESTION)
            await page.locator("#ask").click()
            await page.locator(".lane.sot .block").first.wait_for()
            await page.locator("#stop").click()
            await page.locator("#status", has_text="Stopped.").wait_for()
            assert await page.locator("#share").is_hidden()


@pytest.mark.slow
async def test_on_the_default_model_in_light_dark_and_on_a_phone(tmp_path: Path) -> None:
    """Set SCREENSHOTS to a folder to keep the pictures that docs/guides/serving.md shows."""
    from local_backend import ChatLocal

    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    with ChatLocal.default(drafter="reference_copy") as chat:
        index = retrieval_copy.FolderIndex(ROOT / "examples" / "pottery")
        index.update()
        retriever = retrieval_copy.BM25Retriever(documents=index.documents)
        copying = Copying(retrieval_copy.cite, partial(retrieval_copy.RetrievalCopyChain, retriever))
        with served(chat, copying=copying, in_turn=True) as running:
            async with browser() as opened:
                visit = Visit(await opened.new_page(viewport={"width": 1200, "height": 900}))
                page = visit.page
                grown = await visit.ask(running.url, "What are the benefits of making pottery?", seconds=200)
                assert _grew_in_parallel(grown)
                assert await page.locator(".figures tbody tr").count() == 3
                for name, width, scheme in (
                    ("light", 1200, "light"),
                    ("dark", 1200, "dark"),
                    ("phone", 375, "light"),
                ):
                    await page.emulate_media(color_scheme=scheme)
                    await page.set_viewport_size({"width": width, "height": 900})
                    assert await _fits(page)
                    await page.screenshot(path=folder / f"race-{name}.png", full_page=name != "phone")
                assert visit.said == []
