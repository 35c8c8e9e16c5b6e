// Asking the server. Whether it answers at all is said in one place, and asking goes on until it does.
import { find, sentence, show } from "./dom.js";

const LONGEST_WAIT = 5000; // milliseconds between two tries
const TIMEOUT = 60000;
const REASONS = { 0: "the server does not respond: is `lapclip serve` running?", 429: "too many requests at once", 503: "the server is busy" };
let isLost = false;

/** An answer that is none: in words, with what to do. */
export class Refused extends Error {
  constructor(status, { error, hint }, seconds = 0) {
    super(typeof error === "string" ? error : `the server returned status ${status}`);
    this.status = status;
    this.hint = typeof hint === "string" ? hint : "";
    this.seconds = seconds;
  }
}

function connected(status) {
  const words = REASONS[status] ? `${REASONS[status]} (trying again)` : "";
  show("connection", words, () => sentence(words));
  if (isLost && !words) document.dispatchEvent(new Event("connected"));
  isLost = Boolean(words);
}

async function askOnce(path, { signal, body }) {
  const limited = AbortSignal.any([AbortSignal.timeout(TIMEOUT), ...(signal ? [signal] : [])]);
  const kind = body?.type.startsWith("image/") ? body.type : "application/octet-stream";
  const options = body ? { method: "POST", body, headers: { "content-type": kind } } : {};
  let answer, told;
  try {
    answer = await fetch(path, { ...options, signal: limited, cache: "no-store" });
    told = await answer.json();
  } catch (problem) {
    if (signal?.aborted) throw problem;
    if (!answer || answer.ok) throw new Refused(0, {});
    told = {};
  }
  if (!answer.ok) throw new Refused(answer.status, told, Number(answer.headers.get("retry-after")) || 0);
  return told;
}

const sleep = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); });
});

/** What the server answers, however long it takes to come back. Throws `Refused`, or whatever an abort is. */
export async function ask(path, options = {}) {
  for (let tries = 1; ; tries += 1) {
    try {
      const told = await askOnce(path, options);
      connected(200);
      return told;
    } catch (problem) {
      if (options.signal?.aborted) throw problem;
      connected(problem.status);
      if (!(problem.status in REASONS)) throw problem;
      await sleep(Math.max(problem.seconds * 1000, Math.min(LONGEST_WAIT, 500 * tries)), options.signal);
      options.signal?.throwIfAborted();
    }
  }
}

/** A problem in words under the field, or none. */
export function showProblem(problem) {
  find("problem").hidden = !problem;
  const words = problem ? [problem.message, problem.hint] : [];
  show("problem", words, () => words.filter(Boolean).flatMap((part, i) => {
    const line = document.createElement(i ? "span" : "strong");
    line.append(...sentence(part));
    return [line];
  }));
}
