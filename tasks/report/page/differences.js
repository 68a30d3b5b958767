// The first call in which two episodes of a problem differ. Each column is compared with the second, the model in
// question, and the second with the first; replies are not compared, since they follow from the calls.
"use strict";

(() => {
  // For each column {turn, call, words} or null where there is nothing to compare with or no difference.
  turnwise.findDifferences = (columns) => columns.map((column, i) => {
    const other = columns[i === 1 ? 0 : 1];
    return column.shown && other?.shown ? firstDifference(column.shown, other.shown, other.policy.label) : null;
  });

  function firstDifference(shown, other, label) {
    const [mine, theirs] = [callsOf(shown), callsOf(other)];
    let place = 0;
    while (place < mine.length && place < theirs.length && mine[place].what === theirs[place].what) place++;
    if (place < mine.length) return { turn: mine[place].turn, call: mine[place].call, words: `first call that differs from ${label}` };
    if (place === theirs.length || !shown.turns.length) return null; // the same calls throughout
    const last = mine.length ? mine[mine.length - 1].turn : -1;
    return { turn: Math.min(last + 1, shown.turns.length - 1), call: null, words: `makes no further call, unlike ${label}` };
  }

  const callsOf = ({ turns }) => turns.flatMap((turn, t) => turn.calls.map((call, c) =>
    ({ turn: t, call: c, what: JSON.stringify([call.malformed ? turn.raw : call.name, [...call.arguments].sort(), call.digest]) })));

  turnwise.jumpToDifference = () => {
    const mark = document.querySelector(".differs");
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    mark?.scrollIntoView({ block: "center", inline: "nearest", behavior: isStill ? "instant" : "smooth" });
  };
})();
