// What the reader looks at, kept in the address after `#`, so that a link or a bookmark shows the same. Every change goes
// through `turnwise.go`; the page is drawn from the state alone.
"use strict";

(() => {
  const FILTERS = ["q", "change", "category", "of", "outcome", "error", "tool", "limit"];
  const MAX_COLUMNS = 4;
  turnwise.FILTERS = FILTERS;
  turnwise.MAX_COLUMNS = MAX_COLUMNS;

  // The state of an address; what is missing or invalid gets the default.
  turnwise.readState = (hash) => {
    const said = new URLSearchParams(hash.replace(/^#/, ""));
    const state = { problem: said.get("problem"), sample: Number(said.get("sample") ?? NaN), heat: said.get("heat") === "1" };
    for (const name of FILTERS) state[name] = said.get(name) ?? "";
    const named = new Set((said.get("policies") ?? "").split(",").filter((name) => turnwise.index.policyNamed(name)));
    for (const { name } of turnwise.index.policies) if (named.size < 2) named.add(name);
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
    if (address === (location.hash || "#")) return;
    history[remember ? "pushState" : "replaceState"](null, "", address);
    turnwise.changed();
  };

  // The shown policies, first the two that are compared.
  turnwise.shownPolicies = () => turnwise.state.policies.map(turnwise.index.policyNamed);
})();
