"use strict";
/* The index of a folder: a click on a heading sorts by its column, a second one the other way; what is empty stays last. */
(() => {
  const table = document.getElementById("models");
  const headings = [...table.tHead.rows[0].cells];
  const orders = (row, column) => row.cells[column].dataset.order;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  headings.forEach((heading, column) => {
    heading.firstElementChild.addEventListener("click", () => {
      const sign = heading.ariaSort === "ascending" ? -1 : 1;
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [orders(a, column), orders(b, column)];
        return x === "" || y === "" ? (x === "") - (y === "") : sign * compare(x, y);
      });
      table.tBodies[0].append(...rows);
    });
  });
})();
