// Builds the page: loads the index, fills the controls, and draws the state whenever it changes.
"use strict";

(() => {
  const { el, words } = turnwise;
  const byId = (id) => document.getElementById(id);
  const SELECTS = ["category", "of", "outcome", "error", "tool", "limit"];
  const TYPING_PAUSE = 120; // milliseconds
  const LOW_WINDOW = 600; // pixels; below it open filters would leave no room for the list
  let flags = { q: "", found: null };
  let typing = null; // the timer of a search that is typed and not yet run
  let drawn = null; // settled when the page shows the newest state

  async function start() {
    turnwise.openIndex(await turnwise.load("index"));
    turnwise.readAddress();
    document.title = `Trajectories · ${turnwise.index.title}`;
    if (turnwise.index.overview) { byId("overview").href = turnwise.index.overview; byId("overview").hidden = false; }
    fillControls();
    window.addEventListener("popstate", follow);
    showWhatIsChosen();
    const isWide = matchMedia("(min-width: 60rem)").matches; // as in browser.css: room for the list and a problem
    const isWanted = isWide || SELECTS.some((name) => turnwise.state[name]);
    byId("more").open = isWanted && innerHeight >= LOW_WINDOW;
    await turnwise.changed();
    if (isWide && turnwise.state.problem === null) {
      turnwise.moveBy(1); // the first one, rather than an empty pane
      await drawn;
    }
    turnwise.revealRow();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }

  // The reader went back or forward, or changed the address.
  function follow() {
    turnwise.readAddress();
    stopTyping(); // what was being typed is of the place that the reader left
    turnwise.changed();
    showWhatIsChosen();
    turnwise.revealRow();
  }

  // Where there is room for only one: the chosen problem, or the list.
  function showWhatIsChosen() {
    document.body.dataset.view = turnwise.state.problem === null ? "list" : "problem";
  }

  // The state has changed: draw it.
  turnwise.changed = () => { drawn = draw(); return drawn; };

  async function draw() {
    const { q } = turnwise.state;
    let failure = null;
    if (flags.q !== q) {
      const found = await turnwise.search(q).catch((error) => { failure = error.message; return []; });
      if (turnwise.state.q !== q) return; // the reader typed on meanwhile
      flags = { q: failure === null ? q : null, found };
    }
    const { rows, counts, total } = turnwise.fitting(turnwise.state, flags.found);
    if (turnwise.state.problem !== null && !Number.isInteger(turnwise.state.sample)) turnwise.state.sample = sampleToOpen(rows);
    drawControls(rows, counts, total);
    if (failure !== null) byId("status").textContent = failure;
    turnwise.showRows(rows);
    await turnwise.drawProblem();
  }

  // Where the address names a problem without a sample: the first sample that fits the filters, or the first.
  function sampleToOpen(rows) {
    const problem = turnwise.index.problemNumbers.get(turnwise.state.problem);
    const fitting = rows.find((row) => row.problem === problem);
    if (fitting) return fitting.sample;
    const episode = turnwise.shownPolicies().flatMap((policy) => policy.samplesOf.get(problem) ?? [])[0];
    return episode === undefined ? 0 : turnwise.index.episodes.sample[episode];
  }

  function fillControls() {
    const { policies, categories, outcomes, errors, tools, limits } = turnwise.index;
    const option = (value, text = words(value)) => el("option", { value }, text);
    const sorted = (names) => [...names].sort().map((name) => option(name));
    for (const id of ["before", "after"]) byId(id).append(...policies.map(({ name, label }) => option(name, label)));
    byId("category").append(option("", "any"), ...[...categories].sort().map((name) => option(name, name)));
    byId("of").append(option("", "any policy shown"), ...policies.map(({ name, label }) => option(name, label)));
    byId("outcome").append(option("", "any"), option(turnwise.NOT_SUCCESS, "any that failed"), ...sorted(outcomes));
    byId("error").append(option("", "any"), ...sorted(errors));
    byId("tool").append(option("", "any"), ...[...tools].sort().map((name) => option(name, name)));
    byId("limit").append(option("", "any"), ...sorted(limits));
    for (const id of SELECTS) byId(id).addEventListener("change", () => turnwise.go({ [id]: byId(id).value }));
    byId("before").addEventListener("change", comparePolicies);
    byId("after").addEventListener("change", comparePolicies);
    byId("changes").addEventListener("change", (event) => turnwise.go({ change: event.target.value }));
    byId("q").addEventListener("input", () => {
      stopTyping();
      typing = setTimeout(() => turnwise.setSearch(byId("q").value), TYPING_PAUSE);
    });
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("reset", (event) => {
      event.preventDefault();
      turnwise.setSearch("");
      turnwise.go(Object.fromEntries(turnwise.FILTERS.map((name) => [name, ""])));
    });
    for (const [change, name] of [["", "All"], ...Object.entries(turnwise.CHANGES)]) {
      byId("changes").append(el("label", el("input", { type: "radio", name: "change", value: change }), el("span", name, el("b", { "data-count": change }))));
    }
  }

  function stopTyping() {
    clearTimeout(typing);
    typing = null;
  }

  turnwise.setSearch = (q) => {
    stopTyping();
    byId("q").value = q;
    turnwise.go({ q });
  };

  // Run at once what is typed; settled when its rows are in the list.
  turnwise.finishSearch = async () => {
    if (typing !== null) turnwise.setSearch(byId("q").value);
    await drawn;
  };

  // The two compared, then the others shown before. The same policy twice is not a comparison: the two are swapped.
  function comparePolicies(event) {
    const [before, after, ...others] = turnwise.state.policies;
    let next = [byId("before").value, byId("after").value];
    if (next[0] === next[1]) next = event.target.id === "before" ? [after, before] : [after, before];
    turnwise.go({ policies: [...next, ...others.filter((name) => !next.includes(name))] });
  }

  function drawControls(rows, counts, total) {
    const { state } = turnwise;
    if (typing === null && byId("q").value !== state.q) byId("q").value = state.q; // the caret stays where it is the same
    [byId("before").value, byId("after").value] = state.policies;
    for (const id of SELECTS) byId(id).value = state[id];
    for (const input of byId("changes").querySelectorAll("input")) input.checked = input.value === state.change;
    const numFitting = Object.values(counts).reduce((sum, some) => sum + some);
    for (const count of byId("changes").querySelectorAll("b")) {
      const change = count.dataset.count;
      count.textContent = (change ? counts[change] : numFitting).toLocaleString("en");
    }
    const numFilters = SELECTS.filter((id) => id !== "of" && state[id]).length;
    byId("num-filters").textContent = numFilters ? ` · ${numFilters} on` : "";
    const [listed, all] = [rows.length.toLocaleString("en"), turnwise.count(total, "problem")];
    const matched = counts.unmatched && !state.change ? ` · ${(numFitting - counts.unmatched).toLocaleString("en")} met by both` : "";
    byId("status").textContent = (rows.length === total ? all : `${listed} of ${all}`) + matched;
    byId("clear").hidden = !turnwise.FILTERS.some((name) => state[name]);
  }

  start().catch((error) => {
    document.body.dataset.view = "problem";
    byId("problem").replaceChildren(el("p.empty", { role: "alert" }, error.message));
  });
})();
