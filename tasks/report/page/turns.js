// One turn of one episode: what was said, each call with its reply and error, and the tokens where asked for.
"use strict";

(() => {
  const { el, words } = turnwise;
  // JSON reads from left to right whatever the first letter in it; other text as it begins.
  const directionOf = (text) => (/^\s*[{[]/.test(text) ? "ltr" : "auto");
  const LONG = 1200; // characters of a reply that are shown at once

  // `policy` wrote it; `difference` is {call, words} where a call of this turn is the first that differs, {call: null, words} where this
  // turn makes no call and another column does; `tokens` is what heat.js draws, or null.
  turnwise.drawTurn = (turn, number, { policy, difference = null, tokens = null }) => {
    const said = tokens ? [turnwise.heatOf(tokens)] : [
      turn.thought ? drawThought(turn.thought) : null,
      turn.prose ? el("pre.prose", { dir: directionOf(turn.prose) }, turn.prose) : null,
    ];
    const calls = turn.calls.map((call, i) =>
      drawCall(call, difference && difference.call === i ? difference.words : null, { isWritten: tokens !== null }));
    const facts = factsOf(turn);
    return el(`li.turn${turn.sequence ? ".branch" : ""}`, { value: String(number) },
      el("span.number", { "aria-hidden": "true" }, String(number)),
      el("div.said",
        el("p.whose", turnwise.policyDot(policy), policy.label),
        turn.sequence_note ? el("p.sequence", turn.sequence_note) : null,
        difference && difference.call === null ? el("p.differs", difference.words) : null,
        ...said,
        ...calls,
        turn.raw === null || tokens ? facts && el("p.foot", facts)
          : fold(["as written", facts].filter(Boolean).join(" · "), el("pre.raw", { dir: directionOf(turn.raw) }, turn.raw)),
        turn.follow_up === null ? null : el("p.user", { dir: "auto" }, el("b", "user "), turn.follow_up)));
  };

  // What the model thought is no message: folded, and marked as such.
  function drawThought(thought) {
    const size = turnwise.count(thought.num_tokens, "token");
    return el("details.fold.thought",
      el("summary", `thought · ${size}${thought.was_cut ? " · cut by its budget" : ""}`),
      el("pre", { dir: "auto" }, thought.text || "(empty)"));
  }

  // `isWritten`: its tokens are shown above.
  function drawCall(call, difference, { isWritten }) {
    return el("div.call",
      difference === null ? null : el("p.differs", difference),
      isWritten ? null : el("p.head", el(`bdi.tool${call.malformed ? ".malformed" : ""}`, call.name),
        ...call.arguments.flatMap(([name, value]) => [" ", el("span.argument", el("bdi.key", name), " ", el("bdi", value))])),
      call.reply === null ? null : drawReply(call.reply, call.error));
  }

  function drawReply(reply, error) {
    const text = el("pre", { dir: directionOf(reply) }, reply.slice(0, LONG) || "(empty)");
    const rest = reply.length - LONG;
    const showAll = () => {
      text.textContent = reply;
      text.tabIndex = -1;
      text.focus({ preventScroll: true }); // the button that had the focus goes
      more.remove();
    };
    const more = rest > 0 && el("button.plain", { type: "button", onclick: showAll },
      `show ${turnwise.count(rest, "more character")}`);
    return el(`div.reply${error ? ".failed" : ""}`, error ? el("span.error", words(error)) : null, text, more);
  }

  function factsOf(turn) {
    const parts = [];
    if (turn.num_tokens !== null) parts.push(turnwise.count(turn.num_tokens, "token"));
    if (turn.stopped_by !== null) parts.push(`cut by ${words(turn.stopped_by)}`);
    return parts.join(" · ");
  }

  const fold = (name, content) => el("details.fold", el("summary", name), content);

  // How an episode ended: outcome, limit, fault, the checks, what a reward can be made of, and details.
  turnwise.drawVerdict = (shown, policy) => el("div.verdict",
    el("p", turnwise.badge(shown.outcome), shown.limit && shown.limit !== shown.outcome ? el("span.muted", ` stopped by ${words(shown.limit)}`) : null),
    shown.fault ? el("pre.fault", { dir: "auto" }, shown.fault) : null,
    shown.checks.length ? el("ul.checks", { "aria-label": "Checks" }, ...shown.checks.map(([name, passed]) =>
      el(`li.${passed ? "passed" : "failed"}`, `${passed ? "✓" : "✗"} ${words(name)}`, el("span.unseen", passed ? " passed" : " failed")))) : null,
    shown.parts.length ? el("div", el("p.foot", shown.reward === null ? "parts of a reward, before weights" : `reward ${shown.reward}: part = weight × value`),
      el("dl.parts", ...shown.parts.map(([name, value]) => el("div", el("dt", name), el("dd", String(value)))))) : null,
    shown.details ? fold("details", el("pre", { dir: directionOf(shown.details) }, shown.details)) : null,
    el("p.foot", `line ${shown.line} of `, el("code", policy.file)));

  turnwise.badge = (outcome) => {
    if (outcome === turnwise.LOST) return el("span.badge", `– ${words(outcome)}`);
    return outcome === "success" ? el("span.badge.good", `✓ ${words(outcome)}`) : el("span.badge.bad", `✗ ${words(outcome)}`);
  };
})();
