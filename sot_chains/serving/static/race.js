// Asks a question and shows what each way writes while it is written. All text is set as text, never as HTML.
const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "How can I manage my money better and save more?",
  "What should I look for in a good bicycle?",
  "How can I sleep better?",
  "What makes a town good to live in?",
];
let about = null;
let running = null; // the AbortController of the race

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

class Lane {
  constructor(name, title) {
    this.blocks = new Map();
    this.begun = null;
    this.root = make("section", `lane ${name}`);
    const heading = make("h2", "", `${title} `);
    this.clock = heading.appendChild(make("span", "clock", ""));
    this.note = make("p", "note", "");
    this.root.append(heading, this.note);
    this.title = title;
    this.track = make("li", `track ${name}`);
    this.bar = make("span", "bar");
    this.seconds = make("span", "time", "");
    const rail = make("span", "rail");
    rail.append(this.bar);
    this.track.append(make("span", "label", title), rail, this.seconds);
    this.wait("waits for its turn");
  }

  wait(said) {
    this.note.textContent = this.seconds.textContent = said;
  }

  start() {
    this.begun = performance.now();
    this.note.textContent = "writing…";
  }

  fail(said) {
    this.done(null, said);
    this.root.classList.add("failed");
    this.track.classList.add("failed");
    this.seconds.textContent = said === "Stopped." ? "stopped" : "failed";
  }

  point(number, heading) {
    const block = make("div", "block growing");
    if (heading) block.append(make("h3", "", heading));
    this.blocks.set(number, block.appendChild(make("p", "text", "")));
    this.root.append(block);
  }

  text(number, text) {
    if (!this.blocks.has(number)) this.point(number, "");
    this.blocks.get(number).append(text);
  }

  done(seconds, note) {
    this.took = seconds ?? (this.begun && (performance.now() - this.begun) / 1000);
    this.begun = null;
    this.clock.textContent = seconds === null ? "–" : `${seconds.toFixed(2)} s`;
    this.seconds.textContent = this.clock.textContent;
    this.note.textContent = note;
    for (const text of this.blocks.values()) text.parentElement.classList.remove("growing");
  }

  tick(now) {
    if (this.begun === null) return;
    this.took = (now - this.begun) / 1000;
    this.clock.textContent = this.seconds.textContent = `${this.took.toFixed(1)} s`;
  }
}

// All bars have one clock: the longest lane so far is as wide as the track, also if lanes run in turn.
function draw(lanes) {
  const longest = Math.max(1, ...lanes.map((lane) => lane.took || 0));
  for (const lane of lanes) lane.bar.style.width = `${(100 * (lane.took || 0)) / longest}%`;
}

function say(text, failed = false) {
  $("status").textContent = text;
  $("status").classList.toggle("failed", failed);
}

// The events of a stream: [kind, value], as the lines of text/event-stream say.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const data = lines.find((line) => line.startsWith("data: "));
      const kind = lines.find((line) => line.startsWith("event: "));
      if (data) yield [kind?.slice(7), JSON.parse(data.slice(6))];
    }
  }
}

async function ask(question) {
  running?.abort();
  const race = (running = new AbortController());
  const lanes = new Map(Object.entries(about.lanes).map(([name, title]) => [name, new Lane(name, title)]));
  const board = make("div", "lanes");
  board.append(...[...lanes.values()].map((lane) => lane.root));
  $("race").replaceChildren(...[...lanes.values()].map((lane) => lane.track));
  $("result").replaceChildren(board);
  $("share").hidden = true;
  $("stop").disabled = false;
  say("Asking…");
  const timer = setInterval(() => {
    lanes.forEach((lane) => lane.tick(performance.now()));
    draw([...lanes.values()]);
  }, 100);
  try {
    const headers = { "content-type": "application/json" };
    if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
    const body = JSON.stringify({ question, in_turn: $("in-turn").checked });
    const response = await fetch("/race", { method: "POST", headers, body, signal: race.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const [kind, event] of eventsOf(response)) {
      const lane = lanes.get(event.lane);
      if (kind === "start") lane.start();
      else if (kind === "point") lane.point(event.point, event.heading);
      else if (kind === "text") lane.text(event.point, event.text);
      else if (kind === "done" && event.seconds === null) lane.fail(event.note);
      else if (kind === "done") lane.done(event.seconds, event.note);
      else if (kind === "end") await show(event);
      else throw new Error(event.error.message);
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    const said = stopped ? "Stopped." : `It failed: ${error.message}`;
    if (running === race) say(said, !stopped);
    for (const lane of lanes.values()) {
      if (lane.begun !== null) lane.fail(said);
      else if (lane.took === undefined) lane.wait("did not begin");
    }
  } finally {
    clearInterval(timer);
    draw([...lanes.values()]);
    if (running === race) {
      running = null;
      $("stop").disabled = true;
    }
  }
}

// The finished run as the server renders it, with a timeline and a table; scripts in it would not run.
function show({ fragment, page }) {
  const urlOf = (text) => URL.createObjectURL(new Blob([text], { type: "text/html" }));
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.responseType = "document";
    request.open("GET", urlOf(fragment));
    request.onerror = () => reject(new Error("the finished run cannot be read"));
    request.onload = () => {
      const run = request.response?.querySelector("div.sot-run");
      if (!run) return request.onerror();
      $("result").replaceChildren(document.adoptNode(run));
      const verdict = $("result").querySelector(".verdict");
      say(verdict?.textContent ?? "Done.", verdict?.classList.contains("failed"));
      verdict?.remove();
      URL.revokeObjectURL($("link").href);
      $("link").href = urlOf(page);
      $("share").hidden = false;
      resolve();
    };
    request.send();
  });
}

async function begin() {
  about = await (await fetch("/about")).json();
  $("model").textContent = about.model;
  $("ways").textContent = Object.keys(about.lanes).length > 2 ? "three times" : "twice";
  $("third").hidden = !about.lanes.copy;
  $("in-turn").checked = about.in_turn;
  $("key-line").hidden = !about.needs_key;
  for (const example of EXAMPLES) {
    const button = make("button", "", example);
    button.type = "button";
    button.onclick = () => {
      $("question").value = example;
      $("form").requestSubmit();
    };
    $("examples").append(button);
  }
  $("form").onsubmit = (event) => {
    event.preventDefault();
    if ($("question").value.trim()) ask($("question").value.trim());
  };
  $("question").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  };
  $("stop").onclick = () => running?.abort();
  document.documentElement.dataset.ready = "yes";
}

begin();
