"use strict";
(() => {
  const root = document.documentElement;

  // -- colours ----------------------------------------------------------------------------
  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "Light colours" : "Dark colours"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
  theme.hidden = false;

  // -- tables -----------------------------------------------------------------------------
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  // A cell without data-sort has no value and goes last, whichever way the others go.
  const compare = (column, kind, sign) => (a, b) => {
    const x = a.cells[column].dataset.sort;
    const y = b.cells[column].dataset.sort;
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    if (kind === "text") return sign * words.compare(x, y);
    const [p, q] = [Number(x), Number(y)];
    return p === q ? 0 : sign * (p < q ? -1 : 1); // a difference of infinities is not a number
  };

  const following = { none: "ascending", ascending: "descending", descending: "none" };

  const prepare = (article) => {
    const body = article.querySelector("tbody");
    const heads = [...article.querySelectorAll("thead th")];
    const count = article.querySelector(".count");
    const filter = article.querySelector("input");
    const rows = [...body.rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    let order = "";

    const tell = () => {
      const shown = rows.filter((row) => !row.hidden).length;
      const what = rows.length === 1 ? "row" : "rows";
      const all = shown === rows.length ? `${rows.length} ${what}` : `${shown} of ${rows.length} ${what}`;
      count.textContent = `${all} shown${order}`;
    };

    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      button.addEventListener("click", () => {
        const way = following[head.getAttribute("aria-sort")];
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", way);
        const sorted = [...rows];
        if (way !== "none") {
          sorted.sort(compare(column, head.dataset.kind, way === "ascending" ? 1 : -1));
        }
        body.append(...sorted);
        order = way === "none" ? "" : `, ${way} by ${head.dataset.name}`;
        tell();
      });
    });

    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, i) => { row.hidden = !wanted.every((word) => texts[i].includes(word)); });
      tell();
    });
    tell();
    article.querySelectorAll(".controls [hidden]").forEach((part) => { part.hidden = false; });
  };
  document.querySelectorAll("article").forEach(prepare);

  // Only what really scrolls is a stop of the Tab key.
  const boxes = [...document.querySelectorAll(".scroll")];
  const stops = () => boxes.forEach((box) => {
    const scrolls = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    if (scrolls) box.tabIndex = 0; else box.removeAttribute("tabindex");
  });
  window.addEventListener("resize", stops);
  stops();

  // -- figures ----------------------------------------------------------------------------
  const dialog = document.getElementById("enlarged");
  const canvas = dialog.querySelector(".canvas");
  let opener = null;
  document.querySelectorAll("figure").forEach((figure) => {
    const image = figure.querySelector("img");
    const button = figure.querySelector("button");
    if (!image || !button) return;
    const open = () => {
      opener = button;
      document.getElementById("enlarged-title").textContent = figure.querySelector("h3").textContent;
      dialog.querySelector(".caption").textContent = figure.querySelector("p").textContent;
      canvas.replaceChildren(image.cloneNode());
      dialog.showModal();
      document.getElementById("close").focus();
    };
    button.hidden = false;
    button.addEventListener("click", open);
    image.addEventListener("click", open);
  });
  document.getElementById("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => {
    canvas.replaceChildren();
    if (opener) opener.focus();
  });
})();
