// The page: what is asked is one state, also in the address; every change of it asks the server, and the newest answer is shown.
import { find, make, show, showText } from "./dom.js";
import { ask, showProblem } from "./search-api.js";
import { closeCloser, openCloser, setUpCloser, shownImage } from "./search-closer.js";
import { focusImage, focusedImage, setUpGrid, showResults } from "./search-grid.js";
import { FILTERS, FIRST_TOP, MAX_TOP, address, allTerms, inWords, readAddress, request } from "./search-query.js";
import { keepUpload, showTerms, uploaded } from "./search-terms.js";
import { counted, images, showWelcome } from "./search-welcome.js";

const PAUSE = 150; // milliseconds without a key before words are asked for
const SECONDS_BETWEEN_LOOKS = 15;
const MAX_BYTES = 32 << 20; // of an image, as the server allows
let state = readState(), health = null, found = null; // the answer that is shown
let asking = null, timer = 0, isTyping = false, isGoingBack = false;

function readState() {
  const read = readAddress(location.search), upload = uploaded(history.state?.upload) ? history.state.upload : 0;
  return upload ? { ...read, terms: [...read.terms, { sign: 1, upload }] } : read;
}

const uploadOf = ({ terms }) => terms.find((term) => term.upload)?.upload;

/** Changes what is asked. What is typed in one go is one step back; so is every other change, but for `replace`. */
function change(changes, { replace = false, typed = false, pause = 0 } = {}) {
  const isOther = Object.keys(changes).some((name) => name !== "open" && name !== "top");
  state = { ...state, ...(isOther ? { top: FIRST_TOP, open: 0 } : {}), ...changes };
  const memory = { upload: uploadOf(state), isOpened: Boolean(state.open) && (!replace || history.state?.isOpened) };
  if (replace || (typed && isTyping)) history.replaceState(memory, "", address(state));
  else history.pushState(memory, "", address(state));
  isTyping = typed;
  update(pause);
}

function update(pause = 0) {
  showAsked();
  clearTimeout(timer);
  timer = setTimeout(search, pause);
}

function showAsked() {
  showTerms(state, { toggle, remove });
  if (find("words").value !== state.text) find("words").value = state.text;
  find("score").value = state.minScore;
  showText("score-words", state.minScore ? state.minScore.toFixed(2) : "any");
  find("folder").value = state.folder;
  for (const [name, id] of Object.entries(FILTERS)) if (document.activeElement !== find(id)) find(id).value = state[name];
  if (Object.keys(FILTERS).some((name) => state[name])) find("more-filters").open = true;
  document.title = inWords(state) ? `${inWords(state)} - lapclip` : "lapclip";
  const isAsked = allTerms(state).length > 0;
  find("filters").hidden = !isAsked;
  find("welcome").hidden = isAsked || !health;
}

async function search() {
  const isAsked = allTerms(state).length > 0, question = request(state), upload = uploadOf(state);
  if (found && found.question === question && found.upload === upload) return showFound();
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  if (!isAsked) {
    found = null;
    showProblem(null);
    showFound();
    return;
  }
  find("grid").setAttribute("aria-busy", "true");
  try {
    const answer = await ask(question, { signal, body: uploaded(upload)?.blob });
    if (signal.aborted) return;
    found = { ...answer, question, upload };
    showProblem(null);
  } catch (problem) {
    if (signal.aborted) return;
    found = null;
    showProblem(problem);
  }
  showFound();
}

function showFound() {
  const results = found?.results ?? [];
  find("grid").removeAttribute("aria-busy");
  showResults(results, { open, similar });
  const isFull = results.length >= state.top;
  find("more").hidden = !isFull || state.top >= MAX_TOP || results.length >= found.num_pictures;
  showText("count", found ? said(results.length) : "");
  const opened = results.find((result) => result.id === state.open);
  if (opened) {
    openCloser(opened, results);
    return;
  }
  const last = shownImage();
  if (!last) return;
  closeCloser();
  focusImage(last);
}

function said(count) {
  const words = (found.unknown_words ?? []).map((word) => `\u201c${word}\u201d`).join(", ");
  return [saidCount(count), words && `no training caption contains ${words}`].filter(Boolean).join("; ");
}

function saidCount(count) {
  if (!count) return state.minScore ? "no image has this score" : "no images found";
  return `${images(count)}, the best of ${counted(found.num_pictures)} in ${Math.max(1, Math.round(found.milliseconds))} ms`;
}

const toggle = (term) => change({ terms: state.terms.map((one) => (one === term ? { ...one, sign: -one.sign } : one)) });

const remove = (term) => change({ terms: state.terms.filter((one) => one !== term) });

const similar = (id) => {
  change({ terms: [{ sign: 1, id }], text: "", sign: 1 });
  scrollTo({ top: 0 });
};

function add(id, sign) {
  change({ terms: [...state.terms.filter((term) => term.id !== id), { sign, id }] });
}

const open = (id) => change({ open: id });

function close() {
  if (isGoingBack) return; // it takes a moment; twice would be one question too far
  isGoingBack = Boolean(history.state?.isOpened);
  if (isGoingBack) history.back(); // as the button of a phone does
  else change({ open: 0 }, { replace: true });
}

async function take(file) {
  if (!file) return;
  try {
    if (file.size > MAX_BYTES) throw new Error("it is larger than 32 MB");
    const term = await keepUpload(file);
    change({ terms: [...state.terms.filter((one) => !one.upload), term] });
  } catch (problem) {
    showProblem({ message: `this image cannot be used: ${file.size > MAX_BYTES ? problem.message : "it cannot be read"}`, hint: "choose another one" });
  }
}

/** Words as they are typed: those before a sign become a term of their own. */
function type() {
  let { terms, sign } = state, text = find("words").value;
  for (let part; (part = /^(.*?)(?:^|\s)([+-])\s(.*)$/s.exec(text)); ) {
    if (part[1].trim()) terms = [...terms, { sign, words: part[1].trim() }];
    sign = part[2] === "-" ? -1 : 1;
    text = part[3].trimStart();
  }
  change({ terms, sign, text }, { typed: true, pause: PAUSE });
}

function setUpField() {
  const words = find("words");
  words.addEventListener("input", type);
  words.addEventListener("blur", () => { isTyping = false; });
  find("ask").addEventListener("submit", (event) => { event.preventDefault(); isTyping = false; update(); });
  find("sign").addEventListener("click", () => { change({ sign: -state.sign }); words.focus(); });
  words.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && found?.results.length) {
      event.preventDefault();
      focusImage(found.results[0].id);
    } else if (event.key === "Backspace" && !words.value && !event.repeat) {
      const last = state.terms.at(-1);
      if (state.sign < 0) change({ sign: 1 });
      else if (last) change({ terms: state.terms.slice(0, -1), ...(last.words ? { text: last.words, sign: last.sign } : {}) });
      else return;
      event.preventDefault();
    }
  });
  find("file").addEventListener("change", () => { take(find("file").files[0]); find("file").value = ""; });
  find("score").addEventListener("input", () => change({ minScore: Number(find("score").value) }, { replace: true, pause: 60 }));
  find("folder").addEventListener("change", () => change({ folder: find("folder").value }));
  for (const [name, id] of Object.entries(FILTERS)) {
    find(id).addEventListener("change", () => { if (find(id).checkValidity()) change({ [name]: find(id).value }, { replace: true }); });
  }
  find("more").addEventListener("click", () => change({ top: Math.min(MAX_TOP, state.top * 2) }, { replace: true }));
}

function setUpDropping() {
  const hasFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    find("drop").hidden = false;
  });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) find("drop").hidden = true; });
  addEventListener("drop", (event) => {
    find("drop").hidden = true;
    if (!hasFile(event)) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (!file) return;
    event.preventDefault();
    take(file);
  });
}

function setUpKeys() {
  addEventListener("keydown", (event) => {
    if (event.target.matches?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const id = shownImage() || focusedImage();
    if (event.key === "/" && !shownImage()) find("words").select();
    else if (event.key === "s" && id) similar(id);
    else if ((event.key === "+" || event.key === "-") && id) add(id, event.key === "+" ? 1 : -1);
    else return;
    event.preventDefault();
  });
}

/** Looks again and again whether the server is there, and what it has. */
async function look() {
  clearTimeout(look.timer);
  if (look.isBusy) return;
  look.isBusy = true;
  if (!document.hidden) {
    try {
      const before = health;
      health = await ask("/health");
      showText("about", `${health.model} \u00b7 ${images(health.num_pictures)}`);
      showFolders(health.folders);
      showWelcome(health, (words) => { change({ terms: [], text: words, sign: 1 }); find("words").focus(); });
      showAsked();
      if (look.isRefused) showProblem(null);
      look.isRefused = false;
      if (before && before.num_pictures !== health.num_pictures) { // indexed meanwhile: ask again
        found = null;
        update();
      }
    } catch (problem) {
      look.isRefused = true;
      showProblem(problem);
    }
  }
  look.isBusy = false;
  look.timer = setTimeout(look, (health?.num_pictures ? SECONDS_BETWEEN_LOOKS : 3) * 1000);
}

function showFolders(folders) {
  find("folder-label").hidden = folders.length < 2 && !state.folder;
  const short = (folder) => folder.split(/[\\/]/).filter(Boolean).at(-1) ?? folder;
  const isClear = new Set(folders.map(short)).size === folders.length;
  const all = [["", "all folders"], ...folders.map((folder) => [folder, isClear ? short(folder) : folder])];
  show("folder", all, () => all.map(([value, text]) => make("option", { value, title: value }, text)));
}

addEventListener("popstate", () => { isTyping = isGoingBack = false; state = readState(); update(); });
document.addEventListener("visibilitychange", look);
setUpField();
setUpGrid();
setUpDropping();
setUpKeys();
setUpCloser({ step: (id) => change({ open: id }, { replace: true }), close, similar, add });
update();
look();
