// Full-text search with the word index that word_index.py wrote: only the files for the query's first characters are
// loaded. Words are split as there.
"use strict";

(() => {
  const UNSPACED = "\\u2e80-\\u9fff\\uac00-\\ud7af\\uf900-\\ufaff\\u0e00-\\u0eff";
  const WORD = new RegExp(`[${UNSPACED}]|(?:(?![${UNSPACED}])[\\p{L}\\p{N}_])+`, "gu");
  const MAX_WORD_CHARACTERS = 40;

  turnwise.wordsOf = (query) =>
    [...new Set(query.toLowerCase().match(WORD) ?? [])].map((word) => [...word].slice(0, MAX_WORD_CHARACTERS).join(""));

  // Which episodes contain every word of the query: one flag per episode, or null for no query.
  turnwise.search = async (query) => {
    const words = turnwise.wordsOf(query);
    if (!query.trim()) return null;
    if (!words.length) throw new Error("A search finds words: type a letter or a digit.");
    const each = await Promise.all(words.map(episodesWith));
    return each.reduce((all, some) => all.map((flag, e) => flag & some[e]));
  };

  async function episodesWith(word) {
    const flags = new Uint8Array(turnwise.index.episodes.problem.length);
    const key = keyOf(word);
    if (!turnwise.index.words.includes(key)) return flags;
    const { words, episodes } = await turnwise.load(`words-${key}`);
    for (let i = firstFrom(words, word); i < words.length && words[i].startsWith(word); i++) {
      let number = 0;
      for (const step of episodes[i]) flags[(number += step)] = 1;
    }
    return flags;
  }

  // The file of a word, as `_key` in word_index.py names it.
  function keyOf(word) {
    if (/^[a-z0-9]/.test(word)) return word[0];
    const code = word.codePointAt(0);
    return `u${(code < 0x1000 ? code : code & ~0xff).toString(16).padStart(4, "0")}`;
  }

  // Index of the first of the sorted words that is `word` or comes after it, by code point as Python sorts.
  function firstFrom(words, word) {
    let [low, high] = [0, words.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBefore(words[middle], word)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function isBefore(a, b) {
    const [left, right] = [[...a], [...b]];
    const i = left.findIndex((character, place) => character !== right[place]);
    if (i < 0) return left.length < right.length;
    return i < right.length && left[i].codePointAt(0) < right[i].codePointAt(0);
  }
})();
