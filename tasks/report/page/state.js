// What the reader looks at, written to the address after `#`, so that a link or a bookmark shows the same. Every change
// goes through `turnwise.go`; the page is drawn from the state alone, and the address is read only where the reader set it.
"use strict";

(() => {
  const FILTERS = ["q", "change", "category", "of", "outcome", "error", "tool", "limit"];
  const MAX_COLUMNS = 4;
  // Milliseconds between two addresses that replace one another, as a held key makes them: Chromium drops what is beyond
  // 200 in 10 seconds, Safari what is beyond 100 in 30.
  const WRITE_PAUSE = 350;
  let pause = null; // a timer: no address is replaced until it ends
  let isDue = false; // whether the address is older than the state
  turnwise.FILTERS = FILTERS;
  turnwise.MAX_COLUMNS = MAX_COLUMNS;

  // The state of an address; what is missing or invalid gets the default.
  turnwise.readState = (hash) => {
    const said = new URLSearchParams(hash.replace(/^#/, ""));
    const state = { problem: said.get("problem"), sample: Number(said.get("sample") ?? NaN), heat: said.get("heat") === "1" };
    for (const name of FILTERS) state[name] = said.get(name) ?? "";
    const named = new Set((said.get("policies") ?? "").split(",").filter((name) => turnwise.index.policyNamed(name)));
    for (const { name } of turnwise.index.policies) if (named.size < 2) named.add(name);
    if (!turnwise.index.policyNamed(state.of)) state.of = "";
    state.policies = [...named].slice(0, MAX_COLUMNS);
    if (!turnwise.index.problemNumbers.has(state.problem)) state.problem = null;
    return state;
  };

  // The shortest address of a state: defaults are left out.
  turnwise.addressOf = (state) => {
    const said = new URLSearchParams();
    const defaults = turnwise.index.policies.slice(0, 2).map(({ name }) => name).join(",");
    if (state.problem !== null) said.set("problem", state.problem);
    if (state.problem !== null && Number.isInteger(state.sample)) said.set("sample", state.sample);
    if (state.policies.join(",") !== defaults) said.set("policies", state.policies.join(","));
    for (const name of FILTERS) if (state[name]) said.set(name, state[name]);
    if (state.heat) said.set("heat", "1");
    return `#${said}`;
  };

  // Change the state. `remember` makes a step that the browser's back button undoes; otherwise the address is replaced.
  turnwise.go = (changes, { remember = false } = {}) => {
    const address = turnwise.addressOf({ ...turnwise.state, ...changes });
    if (address === turnwise.addressOf(turnwise.state)) return;
    if (remember) {
      if (isDue) replaceAddress(); // where the back button leads
      history.pushState(null, "", address);
    }
    turnwise.state = turnwise.readState(address);
    if (!remember) replaceSoon();
    turnwise.changed();
  };

  // The reader went back or forward, or changed the address.
  turnwise.readAddress = () => {
    isDue = false;
    turnwise.state = turnwise.readState(location.hash);
  };

  function replaceSoon() {
    isDue = true;
    if (pause !== null) return;
    replaceAddress();
    pause = setTimeout(() => { pause = null; if (isDue) replaceSoon(); }, WRITE_PAUSE);
  }

  function replaceAddress() {
    isDue = false;
    history.replaceState(null, "", turnwise.addressOf(turnwise.state));
  }

  // The shown policies, first the two that are compared.
  turnwise.shownPolicies = () => turnwise.state.policies.map(turnwise.index.policyNamed);
})();
