// What is asked for, and how an address says it: words and images, each of them added or subtracted.

export const FIRST_TOP = 48;
export const MAX_TOP = 1000; // what the server gives at once
export const FILTERS = { after: "after", before: "before", min_size: "size" }; // parameters, and the fields they come from
const SIGN = /(?:^|(?<=\s))([+-])(?=\s|$)/; // as the server has it

/** "beach - people" as terms. A hyphen inside a word has no spaces around it; a sign with nothing after it is not finished yet. */
export function splitWords(text) {
  const parts = text.split(SIGN); // words, sign, words, sign, words
  const terms = [{ sign: 1, words: parts[0].trim() }];
  for (let i = 1; i < parts.length; i += 2) terms.push({ sign: parts[i] === "-" ? -1 : 1, words: parts[i + 1].trim() });
  return terms.filter((term) => term.words);
}

/** Terms as one text that `splitWords` and the server read alike. What is added comes first: a text need not begin with a sign then. */
export function joinWords(terms) {
  const added = terms.filter((term) => term.words && term.sign > 0), taken = terms.filter((term) => term.words && term.sign < 0);
  return [added.map((term) => term.words).join(" + "), ...taken.map((term) => `- ${term.words}`)].filter(Boolean).join(" ");
}

/** The finished terms, and what is being typed as one more. */
export function allTerms(state) {
  const [first, ...rest] = splitWords(state.text);
  return first ? [...state.terms, { ...first, sign: first.sign * state.sign }, ...rest] : state.terms;
}

/** What stands in an address: the last words are those that can be typed on. */
export function readAddress(search) {
  const given = new URLSearchParams(search);
  const words = splitWords(given.get("q") ?? "");
  const last = words.pop() ?? { sign: 1, words: "" };
  const images = [["like", 1], ["unlike", -1]].flatMap(([name, sign]) =>
    given.getAll(name).filter((id) => /^[1-9]\d{0,14}$/.test(id)).map((id) => ({ sign, id: Number(id) })));
  const score = Number(given.get("min_score")), top = Number(given.get("top"));
  return {
    terms: [...words, ...images],
    text: last.words,
    sign: last.sign,
    minScore: score > 0 && score <= 1 ? score : 0,
    folder: given.get("folder") ?? "",
    ...Object.fromEntries(Object.keys(FILTERS).map((name) => [name, /^[\d-]{1,10}$/.test(given.get(name)) ? given.get(name) : ""])),
    top: Number.isInteger(top) && top > 0 && top <= MAX_TOP ? top : FIRST_TOP,
    open: Number(given.get("open")) || 0,
  };
}

function parameters(state) {
  const query = new URLSearchParams(), terms = allTerms(state);
  const words = joinWords(terms);
  if (words) query.set("q", words);
  for (const term of terms) if (term.id) query.append(term.sign > 0 ? "like" : "unlike", term.id);
  if (state.minScore) query.set("min_score", state.minScore);
  if (state.folder) query.set("folder", state.folder);
  for (const name of Object.keys(FILTERS)) if (state[name]) query.set(name, state[name]);
  return query;
}

/** The address of the page that shows this. A dropped image has none: it is nowhere but here. */
export function address(state) {
  const query = parameters(state);
  if (state.top !== FIRST_TOP) query.set("top", state.top);
  if (state.open) query.set("open", state.open);
  return query.size ? `/?${query}` : "/";
}

/** What the server is asked. */
export function request(state) {
  const query = parameters(state);
  query.set("top", state.top);
  return `/search?${query}`;
}

/** In words, for the title of the page. */
export function inWords(state) {
  const images = allTerms(state).filter((term) => !term.words).length;
  return [joinWords(allTerms(state)), images && (images === 1 ? "an image" : `${images} images`)].filter(Boolean).join(", ");
}
