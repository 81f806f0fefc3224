// Starts @copilotkit/aimock for the tests: third-party code that speaks the wires of OpenAI and Anthropic.
//
//   node tests/aimock.mjs PATH-OF-THE-PACKAGE 'JSON'
//
// The JSON tells how often which fault is drawn and how fast text comes. Requests are told apart by the marks
// that the tests' own prompts begin with. Prints its port; GET /__stats tells what was asked and counted.
import http from "node:http";
import { pathToFileURL } from "node:url";

const [, , packagePath, given] = process.argv;
const { LLMock } = await import(pathToFileURL(`${packagePath}/dist/index.js`));
const options = {
  faults: {}, seed: 1, retryAfter: 0.05, latency: {}, chunkSize: 12, truncateAfter: 2, pointText: "", refuse: [],
  ...JSON.parse(given ?? "{}"),
};

// A small generator (mulberry32), so that a run can be told again by its seed.
let state = options.seed >>> 0;
function random() {
  state = (state + 0x6d2b79f5) >>> 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
}

const stats = { requests: 0, faults: {}, input_tokens: 0, output_tokens: 0, starts: [], keys: [] };
const drawn = new WeakMap();

// What happens to a request; drawn once, however often the matcher asks.
function fault(request) {
  if (!drawn.has(request)) {
    let left = random();
    let kind = "none";
    for (const [name, rate] of Object.entries(options.faults)) {
      if (left < rate) { kind = name; break; }
      left -= rate;
    }
    stats.requests += 1;
    stats.starts.push(performance.now());
    stats.faults[kind] = (stats.faults[kind] ?? 0) + 1;
    drawn.set(request, kind);
  }
  return drawn.get(request);
}

function text(content) {
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
}

function asked(request) {
  return text(request.messages.filter((message) => message.role === "user").at(-1)?.content);
}

function stage(request) {
  return /\[(outline|point)\]/.exec(asked(request))?.[1] ?? "plain";
}

function sentence(label) {
  return options.pointText || `All about ${label} in a few words.`;
}

function answer(request) {
  const question = asked(request);
  const last = request.messages.at(-1);
  const begun = last?.role === "assistant" ? text(last.content) : "";
  switch (stage(request)) {
    case "outline":
      return begun ? " alpha\n2. beta\n3. gamma" : "1. alpha\n2. beta\n3. gamma";
    case "point": {
      const label = /point \d+\. (.*)/.exec(question)[1];
      const said = sentence(label);
      const written = begun.includes(":") ? begun.slice(begun.indexOf(":") + 1).trim() : "";
      return (begun ? " " : "") + (said.startsWith(written) ? said.slice(written.length) : said).trim();
    }
    default:
      return "A plain answer in one piece.";
  }
}

function counted(request) {
  const content = answer(request);
  const characters = request.messages.map((message) => text(message.content).length).reduce((a, b) => a + b, 0);
  const usage = { prompt_tokens: Math.ceil(characters / 4), completion_tokens: content.split(/\s+/).length };
  stats.input_tokens += usage.prompt_tokens;
  stats.output_tokens += usage.completion_tokens;
  return { content, usage };
}

// A reply that will be cut is not counted: its usage never arrives.
function uncounted(request) {
  return { content: answer(request) };
}

const mock = new LLMock({ port: 0, logLevel: "silent", journalMaxEntries: 10, chunkSize: options.chunkSize });
function on(matches, response, more = {}) {
  mock.on({ predicate: matches }, response, more);
}
const error = (status, type, message, rest = {}) => ({ error: { message, type, code: type }, status, ...rest });
if (options.refuse.includes("prefill")) {
  on((r) => r.messages.at(-1)?.role === "assistant" && (stats.prefills = (stats.prefills ?? 0) + 1),
    error(400, "invalid_request_error", "This model does not support assistant message prefill."));
}
on((r) => fault(r) === "429", error(429, "rate_limit_error", "too many", { retryAfter: options.retryAfter }));
on((r) => fault(r) === "429-bare", error(429, "rate_limit_error", "too many", { retryAfter: "" }));
on((r) => fault(r) === "500", error(500, "api_error", "broken"));
on((r) => fault(r) === "529", error(529, "overloaded_error", "overloaded"));
on((r) => fault(r) === "malformed", uncounted, { chaos: { malformedRate: 1 } });
on((r) => fault(r) === "disconnect", uncounted, { chaos: { disconnectRate: 1 } });
on((r) => fault(r) === "cut", uncounted, { truncateAfterChunks: options.truncateAfter, latency: 1 });
on((r) => fault(r) === "hang", uncounted, { latency: 20000 });
for (const name of ["outline", "point", "plain"]) {
  on((r) => stage(r) === name, counted, { latency: options.latency[name] ?? 0 });
}
// Replies being written are counted at the socket: aimock has no hook for a client that leaves.
let open = 0;
const emit = http.Server.prototype.emit;
http.Server.prototype.emit = function (event, request, response, ...rest) {
  if (event === "request" && request.method === "POST") {
    open += 1;
    response.once("close", () => { open -= 1; });
  }
  return emit.call(this, event, request, response, ...rest);
};
mock.mount("/__stats", {
  async handleRequest(request, response) {
    response.writeHead(200, { "Content-Type": "application/json" });
    response.end(JSON.stringify({ ...stats, open }));
    return true;
  },
});
await mock.start();
console.log(mock.port);
process.stdin.on("end", () => process.exit(0)).resume(); // ends with the tests, however those end
