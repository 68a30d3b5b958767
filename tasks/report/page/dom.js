// Elements from text. Nothing in the page parses markup: a string only becomes the text of a node, or the
// value of one of the attributes below, none of which can run or load anything.
"use strict";

(() => {
  const ATTRIBUTES = new Set(["class", "id", "role", "title", "dir", "type", "value", "name", "tabindex", "for"]);

  // el("p.note", {title: "…"}, "text", otherElement); null and false children are left out.
  turnwise.el = (what, ...rest) => {
    const [tag, ...classes] = what.split(".");
    const element = document.createElement(tag);
    if (classes.length) element.className = classes.join(" ");
    const hasProperties = rest[0] !== null && typeof rest[0] === "object" && !(rest[0] instanceof Node);
    for (const [name, value] of Object.entries(hasProperties ? rest.shift() : {})) {
      if (name === "onclick") element.addEventListener("click", value);
      else if (typeof value === "boolean") element.toggleAttribute(name, value);
      else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) element.setAttribute(name, value);
      else throw new TypeError(`${name} is no attribute this page sets`);
    }
    for (const child of rest) if (child !== null && child !== undefined && child !== false) element.append(child);
    return element;
  };

  turnwise.words = (name) => name.replaceAll("_", " ");
  turnwise.count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  turnwise.policyDot = (policy) =>
    turnwise.el(`i.dot.${/^[a-z_]+$/.test(policy.name) ? policy.name : "other"}`, { "aria-hidden": "true" });
})();
