// The tokens of a turn, coloured by how unlikely each was to the policy that chose it. Loaded only when asked for.
"use strict";

(() => {
  const { el } = turnwise;
  // Upper ends of the classes in hundredths of a nat; the last is open. As probabilities: 90%, 50%, 20%, 5%, 1%.
  const CLASSES = [11, 69, 161, 300, 461];
  const NAMES = ["over 90%", "50 to 90%", "20 to 50%", "5 to 20%", "1 to 5%", "under 1%"];
  const MOST = 9999; // token_heat.py: unknown
  const PIECE = 5000; // tokens that are drawn at once

  // Turns of tokens for each episode, by number; null where none are stored.
  turnwise.loadHeat = async (episodes) => {
    const texts = await turnwise.load("token-texts");
    const found = await Promise.all(episodes.map((episode) => turnwise.loadEpisode("tokens", episode)));
    return new Map(episodes.map((episode, i) => [episode, found[i] && found[i].map(([numbers, heats]) =>
      ({ texts: numbers.map((number) => texts[number]), heats }))]));
  };

  turnwise.heatOf = ({ texts, heats }) => {
    const worst = heats.reduce((most, heat, i) => (heat > heats[most] ? i : most), 0);
    const mean = Math.round(heats.reduce((sum, heat) => sum + heat, 0) / heats.length);
    return el("div.tokens", ...drawStream(texts, heats),
      el("p.note", `Mean log-prob ${format(mean)}; `, ...(classOf(heats[worst]) === 0 ? ["every token over 90% likely."]
        : ["least likely ", el("code", visible(texts[worst])), `, ${format(heats[worst])} (${probability(heats[worst])}).`])));
  };

  // The tokens, and a button for the next of them where there are more.
  function drawStream(texts, heats) {
    const stream = el("p.stream", { dir: "ltr" });
    const more = el("button.plain", { type: "button", onclick: drawPiece });
    function drawPiece() {
      const begin = stream.childElementCount;
      for (let i = begin; i < Math.min(begin + PIECE, texts.length); i++) {
        stream.append(el(`span.h${classOf(heats[i])}`, { title: describe(texts[i], heats[i]) }, visible(texts[i])));
      }
      const rest = texts.length - stream.childElementCount;
      more.textContent = `show ${turnwise.count(Math.min(PIECE, rest), "more token")} of ${rest.toLocaleString("en")}`;
      if (begin === 0 || rest > 0) return;
      stream.tabIndex = -1;
      stream.focus({ preventScroll: true }); // the button that had the focus goes
      more.remove();
    }
    drawPiece();
    return [stream, stream.childElementCount < texts.length && more];
  }

  turnwise.heatLegend = () => el("p.heat-legend.muted", "How likely the chosen token was: ",
    ...NAMES.map((name, i) => el(`span.h${i}`, name)));

  const classOf = (heat) => { const found = CLASSES.findIndex((end) => heat <= end); return found < 0 ? CLASSES.length : found; };
  const format = (heat) => (heat >= MOST ? "not known" : heat ? `−${(heat / 100).toFixed(2)}` : "0");
  const probability = (heat) => {
    if (heat >= MOST) return "p not known";
    const percent = 100 * Math.exp(-heat / 100);
    return percent < 0.1 ? "p under 0.1%" : `p ${percent.toFixed(percent < 10 ? 1 : 0)}%`;
  };
  const describe = (text, heat) => `${JSON.stringify(text)}\nlog-prob ${format(heat)}, ${probability(heat)}`;

  // Makes white space visible; a line break still breaks the line.
  function visible(text) {
    return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length));
  }
})();
