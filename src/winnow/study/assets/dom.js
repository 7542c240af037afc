"use strict";
/* Elements. Strings of a run are only ever set as text, never as markup. */
const dom = (() => {
  function el(tag, props, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(props || {})) {
      if (key === "swatch") node.style.setProperty("--swatch", `var(--${value})`);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c != null));
    return node;
  }
  const key = (name, swatch, kind = "") =>
    el("span", { class: "key" }, el("span", { class: `swatch ${kind}`, swatch }), el("span", { dir: "auto" }, name));
  return { el, key };
})();
