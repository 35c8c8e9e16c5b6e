// One run as the server tells it: columns of points, and `now`, all that is said in words.

const MOST_POINTS = 4000; // of one kind; beyond, the server sends all again, evenly thinned to half of that or less
const RETRY = 1500; // milliseconds

export class Followed {
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.place = "";
    this.isLost = false;
    this.now = null;
    this.forget();
    this.open();
  }

  forget() {
    this.steps = { step: [] };
    this.inspections = { step: [] };
    this.evaluations = { step: [] };
  }

  /** Goes on from where it was. A hidden page does not: a browser opens only six streams at a time, whatever its tabs. */
  open() {
    this.close();
    if (document.hidden) return;
    const after = this.place ? `&after=${encodeURIComponent(this.place)}` : "";
    this.source = new EventSource(`/stream?run=${encodeURIComponent(this.name)}${after}`);
    this.source.addEventListener("history", (message) => { this.forget(); this.take(message); });
    this.source.addEventListener("more", (message) => this.take(message));
    this.source.addEventListener("error", () => {
      this.isLost = true;
      this.changed(this);
      // The browser tries again by itself, unless the answer was a refusal.
      if (this.source.readyState === EventSource.CLOSED) this.timer = setTimeout(() => this.open(), RETRY);
    });
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
  }

  take(message) {
    const told = JSON.parse(message.data);
    this.place = message.lastEventId;
    this.isLost = false;
    this.now = told.now;
    const kinds = ["steps", "inspections", "evaluations"];
    for (const kind of kinds) {
      for (const [name, values] of Object.entries(told[kind])) (this[kind][name] ??= []).push(...values);
    }
    if (kinds.some((kind) => this[kind].step.length > MOST_POINTS)) {
      this.place = "";
      this.open();
    }
    this.changed(this);
  }
}
