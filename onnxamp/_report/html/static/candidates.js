/* The candidates of a tuning: pointing near one, or focusing it, shows its tooltip and marks its row. */

const startCandidates = () => {
  const plot = byId("front");
  const marks = [...(plot ? plot.querySelectorAll(".candidate") : [])];
  let shown = null;
  const place = (mark) => mark.querySelector(".mark").getBoundingClientRect();
  const show = (mark) => {
    if (mark === shown) return;
    for (const one of [shown, mark]) {
      if (one) for (const part of [one, byId(`candidate-${one.dataset.row}`)]) part.classList.toggle("here", one === mark);
    }
    shown = mark;
    if (!mark) return hideTip();
    const lines = mark.getAttribute("aria-label").split("\n").map((text, i) => [i ? "" : "name", text]);
    tell(lines, place(mark).right, place(mark).bottom);
  };
  const nearest = (event) => {
    const far = (mark) => {
      const box = place(mark);
      return Math.hypot((box.left + box.right) / 2 - event.clientX, (box.top + box.bottom) / 2 - event.clientY);
    };
    const [distance, mark] = marks.map((one) => [far(one), one]).reduce((a, b) => (b[0] < a[0] ? b : a));
    show(distance < 32 ? mark : null);
  };
  plot?.addEventListener("pointermove", nearest);
  plot?.addEventListener("pointerleave", () => show(null));
  for (const mark of marks) {
    mark.addEventListener("focus", () => show(mark));
    mark.addEventListener("blur", () => show(null));
  }
};
