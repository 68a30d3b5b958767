// The report's data: loads chunks as scripts (a page opened from disk may fetch nothing), and the index of episodes.
// What the other scripts share is in `turnwise`; no other name is global.
"use strict";

const turnwise = {};

(() => {
  const CHUNK_NAME = /^[a-z]+(-[a-z0-9]+)*$/;
  const DIGEST = /^[0-9a-f]{12}$/;
  const MAX_LOADS = 40; // chunks that are kept
  const loads = new Map(); // the least recently used first
  const received = new Map();

  // With its digest, so that no cache between a web server and the page gives that of an older report.
  function chunkAddress(name) {
    if (!CHUNK_NAME.test(name) || !DIGEST.test(digestOf(name))) throw new TypeError(`${name} is no chunk of a report`);
    return `data/${name}.js?${digestOf(name)}`;
  }
  const digestOf = (name) => (name === "index" ? document.documentElement.dataset.index : turnwise.index.digests[name]);
  const trusted = window.trustedTypes?.createPolicy("turnwise", { createScriptURL: chunkAddress });

  // The content of a chunk, loaded once while it is in use; a load that failed may be tried again.
  turnwise.load = (name) => {
    const load = loads.get(name) ?? loadScript(name).catch((error) => { loads.delete(name); throw error; });
    loads.delete(name);
    loads.set(name, load);
    if (loads.size > MAX_LOADS) loads.delete(loads.keys().next().value);
    return load;
  };

  function loadScript(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      const settle = () => {
        script.remove();
        const { digest, value } = received.get(name) ?? {};
        received.delete(name);
        if (digest === undefined) reject(new Error(`data/${name}.js did not load. Reload this page if the report was ` +
          "built again; else keep the whole report folder together, or build it again with python -m tasks report."));
        else if (digest !== digestOf(name)) reject(new Error("The report was built again; reload this page."));
        else resolve(value);
      };
      script.src = trusted ? trusted.createScriptURL(name) : chunkAddress(name);
      script.onload = script.onerror = settle; // a script that was cut loads and gives nothing
      document.head.append(script);
    });
  }

  // Called by every chunk.
  turnwise.receive = (name, digest, value) => received.set(name, { digest, value });

  // Episode `number` from its chunk of `kind`: episodes or tokens.
  turnwise.loadEpisode = async (kind, number) => {
    const starts = turnwise.index.chunks[kind];
    let chunk = starts.length - 1;
    while (starts[chunk] > number) chunk--;
    const items = await turnwise.load(`${kind}-${String(chunk).padStart(4, "0")}`);
    return items[number - starts[chunk]];
  };

  // The index with lookups; `finish` in browser.py writes it.
  turnwise.openIndex = (raw) => {
    const { policies, problems, episodes } = raw;
    const numEpisodes = episodes.problem.length;
    policies.forEach((policy, i) => {
      policy.end = policies[i + 1]?.first ?? numEpisodes;
      policy.samplesOf = new Map(); // problem → episodes in order of sample
      for (let e = policy.first; e < policy.end; e++) {
        const known = policy.samplesOf.get(episodes.problem[e]);
        if (known) known.push(e);
        else policy.samplesOf.set(episodes.problem[e], [e]);
      }
      for (const found of policy.samplesOf.values()) found.sort((a, b) => episodes.sample[a] - episodes.sample[b]);
    });
    turnwise.index = {
      ...raw,
      success: raw.outcomes.indexOf("success"),
      lost: raw.outcomes.indexOf(turnwise.LOST),
      problemNumbers: new Map(problems.map(([id], number) => [id, number])),
      policyNamed: (name) => policies.find((policy) => policy.name === name),
    };
  };

  turnwise.isSuccess = (episode) => turnwise.index.episodes.outcome[episode] === turnwise.index.success;

  // Whether the environment lost it: then it says nothing about the policy, and no count has it.
  turnwise.LOST = "environment_error";
  turnwise.isLost = (episode) => turnwise.index.episodes.outcome[episode] === turnwise.index.lost;

  // ✓, ✗, or – for an episode that was lost or is not there.
  turnwise.markOf = (episode) => (episode === undefined || turnwise.isLost(episode) ? "–" : turnwise.isSuccess(episode) ? "✓" : "✗");

  // The samples of a problem that any shown policy has, in order.
  turnwise.samplesOf = (problem) => [...new Set(turnwise.shownPolicies().flatMap((policy) =>
    (policy.samplesOf.get(problem) ?? []).map((episode) => turnwise.index.episodes.sample[episode])))].sort((a, b) => a - b);

  // The episode of a policy on a problem and sample, undefined where it has none.
  turnwise.episodeOf = (policy, problem, sample) =>
    policy.samplesOf.get(problem)?.find((e) => turnwise.index.episodes.sample[e] === sample);

  // "improved" where `after` solves more of the samples that both were measured on, "regressed" where fewer, else "same";
  // "unmatched" where they share none. `changes` in browser.py counts the same way.
  turnwise.changeOf = (problem, before, after) => {
    let [gain, isMatched] = [0, false];
    for (const earlier of before.samplesOf.get(problem) ?? []) {
      const later = turnwise.episodeOf(after, problem, turnwise.index.episodes.sample[earlier]);
      if (later === undefined || turnwise.isLost(earlier) || turnwise.isLost(later)) continue;
      isMatched = true;
      gain += turnwise.isSuccess(later) - turnwise.isSuccess(earlier);
    }
    if (!isMatched) return "unmatched";
    return gain > 0 ? "improved" : gain < 0 ? "regressed" : "same";
  };
})();
