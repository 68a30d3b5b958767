// The chosen problem: its request, its samples, and the episodes of the shown policies side by side, turn by turn.
"use strict";

(() => {
  const { el } = turnwise;
  const pane = document.getElementById("problem");
  let drawing = 0; // the newest; an older one that is still loading must not overwrite it
  let drawn = null; // the problem in the pane
  let shownState = null; // what of the state the pane shows, as text

  // Draw the pane unless it shows the state already: folds stay open and the focus where it is while one types.
  turnwise.drawProblem = async () => {
    const mine = ++drawing;
    const { problem: id, sample, policies, heat } = turnwise.state;
    const wanted = JSON.stringify([id, sample, policies, heat]);
    if (wanted === shownState) return;
    if (id === null) {
      show([welcome()], null, wanted);
      return;
    }
    const problem = turnwise.index.problemNumbers.get(id);
    const columns = turnwise.shownPolicies().map((policy) => ({ policy, episode: turnwise.episodeOf(policy, problem, sample) }));
    const met = columns.map(({ episode }) => episode).filter((episode) => episode !== undefined);
    try {
      const shown = await Promise.all(met.map((episode) => turnwise.loadEpisode("episodes", episode)));
      const tokens = heat ? await turnwise.loadHeat(met) : new Map();
      if (mine !== drawing) return;
      columns.forEach((column) => {
        column.shown = shown[met.indexOf(column.episode)];
        column.tokens = tokens.get(column.episode) ?? null;
      });
      const differences = turnwise.findDifferences(columns);
      const parts = [head(problem, sample, columns, differences.some(Boolean)), ...(heat ? [turnwise.heatLegend()] : [])];
      show([...parts, sides(columns, differences, heat)], id, wanted);
    } catch (error) {
      if (mine === drawing) show([el("p.empty", { role: "alert" }, error.message)], null, null);
    }
  };

  // Fill the pane. Who was at a button of it is then at the button that took its place, else at the pane.
  function show(elements, id, wanted) {
    const focused = pane.contains(document.activeElement) ? document.activeElement.closest("[data-key]")?.dataset.key ?? "" : null;
    pane.replaceChildren(...elements);
    showChosenSample();
    if (drawn !== id) pane.scrollTop = 0;
    [drawn, shownState] = [id, wanted];
    if (focused === null) return;
    const successor = [...pane.querySelectorAll("[data-key]")].find(({ dataset, disabled }) => dataset.key === focused && !disabled);
    (successor ?? pane).focus({ preventScroll: true });
  }

  // Scroll to it where there are more samples than their box shows.
  function showChosenSample() {
    const chosen = pane.querySelector(".samples [aria-pressed=true]");
    if (chosen) chosen.parentElement.scrollTop = chosen.offsetTop - chosen.parentElement.clientHeight / 2;
  }

  function welcome() {
    const { total } = turnwise.fitting(turnwise.state, null);
    return el("div.empty", el("p", turnwise.index.title), el("p.muted", `${turnwise.count(total, "problem")}. Choose one in the list, or press j.`));
  }

  function head(problem, sample, columns, isDifferent) {
    const [id, category, beginning] = turnwise.index.problems[problem];
    const request = columns.find(({ shown }) => shown)?.shown.request ?? beginning;
    return el("header.head",
      el("p.where", el("button.plain.back", { type: "button", "data-key": "back", onclick: () => turnwise.close() }, "‹ problems"),
        el("bdi.category", turnwise.index.categories[category]), el("code", id)),
      el("h2.request", { dir: "auto" }, request),
      el("div.tools",
        el("div.samples", { role: "group", "aria-label": "Sample" }, ...turnwise.samplesOf(problem).map((number) => sampleButton(problem, number, sample))),
        el("div.also", { role: "group", "aria-label": "Also show" }, ...alsoButtons()),
        toggle("heat", "log-probs", turnwise.state.heat, () => turnwise.go({ heat: !turnwise.state.heat }), "Colour every sampled token by its log-prob"),
        el("button.plain.jump", { type: "button", "data-key": "jump", disabled: !isDifferent, onclick: () => turnwise.jumpToDifference() }, "first difference")));
  }

  function sampleButton(problem, number, current) {
    const marks = turnwise.shownPolicies().map((policy) => turnwise.markOf(turnwise.episodeOf(policy, problem, number)));
    return toggle(`sample ${number}`, `sample ${number} ${marks.join(" ")}`, number === current, () => turnwise.go({ sample: number }));
  }

  // The policies beside the two compared, which are chosen above the list.
  function alsoButtons() {
    const { policies } = turnwise.state;
    return turnwise.index.policies.filter(({ name }) => !policies.slice(0, 2).includes(name)).map(({ name, label }) => {
      const isOn = policies.includes(name);
      const button = toggle(`policy ${name}`, `${isOn ? "−" : "+"} ${label}`, isOn, () =>
        turnwise.go({ policies: isOn ? policies.filter((other) => other !== name) : [...policies, name] }));
      button.disabled = !isOn && policies.length >= turnwise.MAX_COLUMNS;
      return button;
    });
  }

  const toggle = (key, text, isOn, onclick, title = "") =>
    el("button.toggle", { type: "button", "data-key": key, "aria-pressed": String(isOn), title, onclick }, text);

  function sides(columns, differences, heat) {
    const numTurns = Math.max(0, ...columns.map(({ shown }) => shown?.turns.length ?? 0));
    const box = el("div.sides", { role: "region", tabindex: "0", "data-key": "sides", "aria-label": "Episodes side by side" },
      ...columns.map((column, i) => side(column, numTurns, differences[i], heat)));
    box.style.setProperty("--columns", columns.length);
    box.style.setProperty("--rows", numTurns + 2); // a heading, the turns, the verdict
    return box;
  }

  function side({ policy, episode, shown, tokens }, numTurns, difference, heat) {
    const name = el("h3", turnwise.policyDot(policy), policy.label);
    if (!shown) return el("section.side", { "aria-label": policy.label }, el("div.top", name), el("p.muted.none", "has no such episode"));
    const turns = shown.turns.map((turn, i) => turnwise.drawTurn(turn, i + 1,
      { policy, difference: difference?.turn === i ? difference : null, tokens: tokens?.[i] ?? null }));
    return el("section.side", { "aria-label": policy.label },
      el("div.top", name, turnwise.badge(shown.outcome), el("p.facts", facts(episode, shown)),
        heat && !tokens ? el("p.facts", "No tokens are stored for this episode.") : null),
      el("ol.turns", { "aria-label": `Turns of ${policy.label}` }, ...turns),
      turnwise.drawVerdict(shown, policy));
  }

  function facts(episode, shown) {
    const { num_calls, num_invalid_calls, num_sampled_tokens } = turnwise.index.episodes;
    const parts = [turnwise.count(shown.turns.length, "turn"), turnwise.count(num_calls[episode], "call")];
    if (num_invalid_calls[episode]) parts.push(`${num_invalid_calls[episode]} invalid`);
    if (num_sampled_tokens[episode] !== null) parts.push(`${turnwise.count(num_sampled_tokens[episode], "token")} written of ${shown.num_tokens}`);
    return parts.join(" · ");
  }
})();
