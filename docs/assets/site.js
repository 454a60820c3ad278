document.addEventListener("DOMContentLoaded", () => {
  // Typeset what pymdownx.arithmatex has marked. KaTeX is beside this file: nothing is loaded from another host.
  for (const element of document.querySelectorAll(".arithmatex")) {
    const display = element.tagName === "DIV";
    const text = element.textContent.trim().slice(2, -2);
    katex.render(text, element, { displayMode: display, throwOnError: false });
  }
  // Names for screen readers that the theme leaves out.
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const nav of document.querySelectorAll(".md-nav[aria-labelledby]")) {
    // The label of a section with a page of its own is an arrow without text.
    nav.setAttribute("aria-label", nav.querySelector(".md-nav__title").textContent.trim());
    nav.removeAttribute("aria-labelledby");
  }
});
window.addEventListener("load", () => {
  // Long names in tables break after _ and /, not within a word.
  for (const name of document.querySelectorAll(".md-typeset table code")) {
    const parts = name.textContent.split(/(?<=[_/])/);
    if (!name.children.length) name.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
  // What scrolls sideways can be reached by keyboard.
  document.querySelectorAll("pre > code, .md-typeset__scrollwrap").forEach((each) => each.setAttribute("tabindex", "0"));
  for (const formula of document.querySelectorAll(".arithmatex")) {
    if (formula.scrollWidth > formula.clientWidth && getComputedStyle(formula).overflowX === "auto") formula.tabIndex = 0;
  }
});
