// The list of problems. Only the visible rows are in the page, so that a long list scrolls as fast as a short one.
"use strict";

(() => {
  const { el } = turnwise;
  const SPARE_ROWS = 6; // above and below the visible rows
  const MAX_MARKS = 4; // samples shown one by one; more are counted
  const CLASSES = { "✓": "i.hit", "✗": "i.miss", "–": "i.lost" };
  const SIGNS = { improved: "▲", regressed: "▼", same: "=", unmatched: "–" };
  const box = document.getElementById("list");
  const sizer = document.getElementById("sizer");
  let rows = [];
  let rowHeight = 0; // pixels, by browser.css and the reader's font

  turnwise.rows = () => rows;
  turnwise.currentRow = () => rows.findIndex(({ problem }) => turnwise.index.problems[problem][0] === turnwise.state.problem);

  turnwise.showRows = (next) => {
    rows = next;
    fitRows();
  };

  function fitRows() {
    const probe = sizer.appendChild(el("div.row"));
    rowHeight = parseFloat(getComputedStyle(probe).height); // known in a hidden list too
    sizer.style.height = `${rows.length * rowHeight}px`;
    drawRows();
  }

  // Scroll to the chosen row with the least movement.
  turnwise.revealRow = () => {
    const top = turnwise.currentRow() * rowHeight;
    if (top < 0) return;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + rowHeight > box.scrollTop + box.clientHeight) box.scrollTop = top + rowHeight - box.clientHeight;
    drawRows();
  };

  // Choose the row `step` away; from none, the first.
  turnwise.moveBy = (step) => {
    if (!rows.length) return;
    const current = turnwise.currentRow();
    openRow(current < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, current + step)));
  };

  function openRow(number, options) {
    const { problem, sample } = rows[number];
    turnwise.go({ problem: turnwise.index.problems[problem][0], sample }, options);
    turnwise.revealRow();
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(box.scrollTop / rowHeight) - SPARE_ROWS);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / rowHeight) + SPARE_ROWS);
    const current = turnwise.currentRow();
    const numbers = new Set(Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i));
    if (current >= 0) numbers.add(current); // the active row must be in the page
    sizer.replaceChildren(...[...numbers].sort((a, b) => a - b).map((number) => drawRow(number, number === current)));
    if (current >= 0) box.setAttribute("aria-activedescendant", `row-${current}`);
    else box.removeAttribute("aria-activedescendant");
  }

  function drawRow(number, isCurrent) {
    const { problem, change } = rows[number];
    const [id, category, request] = turnwise.index.problems[problem];
    const shown = turnwise.shownPolicies();
    const said = shown.map((policy) => `${policy.label} ${solved(policy, problem)}`).join(", ");
    const row = el("div.row", {
      role: "option", id: `row-${number}`, "aria-selected": String(isCurrent), "aria-posinset": String(number + 1),
      "aria-setsize": String(rows.length), "aria-label": `${turnwise.index.categories[category]}, ${change}, ${said}: ${request}`,
      onclick: () => { openRow(number, { remember: true }); turnwise.read(); },
    },
      el("p.kind", el(`span.change.${change}`, { title: change }, SIGNS[change]), el("bdi.category", turnwise.index.categories[category]), el("span.id", id)),
      el("p.ask", { dir: "auto" }, request),
      el("p.marks", ...shown.slice(0, 2).flatMap((policy, i) => [i > 0 && el("span.to", "→"), marks(policy, problem)])));
    row.style.top = `${number * rowHeight}px`;
    return row;
  }

  function marks(policy, problem) {
    const episodes = policy.samplesOf.get(problem) ?? [];
    if (episodes.length > MAX_MARKS) return el("span.count", { title: policy.label }, solved(policy, problem).replace(" of ", "/"));
    const signs = episodes.map((episode) => el(CLASSES[turnwise.markOf(episode)], turnwise.markOf(episode)));
    return el("span.signs", { title: policy.label }, ...(signs.length ? signs : ["–"]));
  }

  function solved(policy, problem) {
    const episodes = (policy.samplesOf.get(problem) ?? []).filter((episode) => !turnwise.isLost(episode));
    return `${episodes.filter(turnwise.isSuccess).length} of ${episodes.length}`;
  }

  let isDue = false;
  function drawSoon() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; drawRows(); });
  }
  box.addEventListener("scroll", drawSoon, { passive: true });
  new ResizeObserver(() => requestAnimationFrame(fitRows)).observe(box);
})();
