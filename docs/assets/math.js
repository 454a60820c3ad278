// Typeset what pymdownx.arithmatex has marked. KaTeX is beside this file: nothing is loaded from another host.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const display = element.tagName === "DIV";
    const text = element.textContent.trim().slice(2, -2);
    katex.render(text, element, { displayMode: display, throwOnError: false });
  }
});
