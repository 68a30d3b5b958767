// The keyboard. Letters are commands while no text is typed.
"use strict";

(() => {
  const search = document.getElementById("q");
  const list = document.getElementById("list");
  const help = document.getElementById("help");

  const ACTIONS = {
    j: () => turnwise.moveBy(1),
    k: () => turnwise.moveBy(-1),
    Enter: () => turnwise.read(),
    Escape: () => turnwise.close(),
    "/": () => { turnwise.close(); search.focus(); },
    "?": () => help.showModal(),
    s: () => nextSample(),
    d: () => turnwise.jumpToDifference(),
    t: () => turnwise.go({ heat: !turnwise.state.heat }),
  };
  const IN_LIST = { ArrowDown: () => turnwise.moveBy(1), ArrowUp: () => turnwise.moveBy(-1) };

  function nextSample() {
    const { problem, sample } = turnwise.state;
    if (problem === null) return;
    const samples = turnwise.samplesOf(turnwise.index.problemNumbers.get(problem));
    if (samples.length) turnwise.go({ sample: samples[(samples.indexOf(sample) + 1) % samples.length] });
  }

  function onKey(event) {
    if (event.isComposing) return; // the keys of an input method choose letters
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const target = event.target;
    if (target === search) return onSearchKey(event);
    if (target.matches("select, textarea, input:not([type=radio])")) return;
    if (event.key === "Enter" && target.matches("button, a, summary")) return;
    const isFree = target === document.body || target === list; // elsewhere arrows scroll
    const action = ACTIONS[event.key] ?? (isFree ? IN_LIST[event.key] : undefined);
    if (!action) return;
    event.preventDefault();
    action();
  }

  function onSearchKey(event) {
    if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      list.focus();
      turnwise.finishSearch().then(() => turnwise.moveBy(0));
    } else if (event.key === "Escape") {
      event.preventDefault();
      if (search.value) turnwise.setSearch("");
      else list.focus();
    }
  }

  document.addEventListener("keydown", onKey);
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  // Read the chosen problem: on a narrow screen it replaces the list.
  turnwise.read = () => {
    if (turnwise.state.problem === null) return;
    document.body.dataset.view = "problem";
    document.getElementById("problem").focus({ preventScroll: true });
  };
  turnwise.close = () => {
    document.body.dataset.view = "list";
    list.focus({ preventScroll: true });
  };
})();
