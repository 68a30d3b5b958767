// Which problems fit the filters, and how many there are of each change. Pure: state and index in, rows out.
"use strict";

(() => {
  turnwise.CHANGES = { improved: "Improved", regressed: "Regressed", same: "Same" };
  turnwise.NOT_SUCCESS = "not_success";

  // {rows, counts, total}: a row is {problem, sample, change}, in the order of the file. `found` has the flags of a
  // search or null. A problem fits where one episode fits all filters; `sample` is the first such. The counts by change
  // ignore the filter on changes.
  turnwise.fitting = (state, found) => {
    const [before, after] = turnwise.shownPolicies();
    const fits = episodeTest(state, found);
    const policies = state.of ? [turnwise.index.policyNamed(state.of)].filter(Boolean) : turnwise.shownPolicies();
    const category = state.category ? turnwise.index.categories.indexOf(state.category) : null;
    const counts = { improved: 0, regressed: 0, same: 0, unmatched: 0 };
    const rows = [];
    let total = 0;
    turnwise.index.problems.forEach(([, categoryOfProblem], problem) => {
      if (!turnwise.shownPolicies().some((policy) => policy.samplesOf.has(problem))) return;
      total++;
      if (category !== null && categoryOfProblem !== category) return;
      const sample = firstSample(problem, policies, fits);
      if (sample === null) return;
      const change = turnwise.changeOf(problem, before, after);
      counts[change]++;
      if (!state.change || state.change === change) rows.push({ problem, sample, change });
    });
    return { rows, counts, total };
  };

  // A test of one episode, by its columns of the index.
  function episodeTest(state, found) {
    const { episodes, outcomes, limits, tools, errors, sets } = turnwise.index;
    const tests = [];
    if (found) tests.push((e) => found[e]);
    if (state.outcome === turnwise.NOT_SUCCESS) tests.push((e) => !turnwise.isSuccess(e) && !turnwise.isLost(e));
    else if (state.outcome) tests.push(equals(episodes.outcome, outcomes.indexOf(state.outcome)));
    if (state.limit) tests.push(equals(episodes.limit, limits.indexOf(state.limit)));
    if (state.tool) tests.push(contains(episodes.tools, sets, tools.indexOf(state.tool)));
    if (state.error) tests.push(contains(episodes.errors, sets, errors.indexOf(state.error)));
    return (e) => tests.every((test) => test(e));
  }

  const equals = (column, value) => (e) => column[e] === value;

  function contains(column, sets, value) {
    const holds = sets.map((set) => set.includes(value));
    return (e) => holds[column[e]];
  }

  function firstSample(problem, policies, fits) {
    let first = null;
    for (const policy of policies) {
      const episode = policy.samplesOf.get(problem)?.find(fits);
      const sample = episode === undefined ? null : turnwise.index.episodes.sample[episode];
      if (sample !== null && (first === null || sample < first)) first = sample;
    }
    return first;
  }
})();
