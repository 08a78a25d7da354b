// The numbers of the step that is pointed at, in the line below each figure.
"use strict";
document.documentElement.classList.add("js");

const nearest = (points, step) => {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(points[high][0] - step) < Math.abs(points[low][0] - step)
    ? points[high]
    : points[low];
};

for (const figure of document.querySelectorAll(".figures figure")) {
  const drawn = figure.querySelector("svg");
  const line = figure.querySelector(".readout");
  const cursor = drawn.querySelector(".cursor");
  const idle = line.textContent;
  const [first, last, left, right] = drawn.dataset.x.split(" ").map(Number);
  const curves = [...drawn.querySelectorAll("[data-values]")].map((path) => ({
    label: path.dataset.label,
    points: path.dataset.values.split(" ").map((pair) => pair.split(":").map(Number)),
  }));
  drawn.addEventListener("pointermove", (event) => {
    const place = drawn.getBoundingClientRect();
    const x = ((event.clientX - place.x) / place.width) * drawn.viewBox.baseVal.width;
    const part = Math.min(1, Math.max(0, (x - left) / (right - left)));
    const asked = first + part * (last - first);
    const found = curves.map((curve) => [curve.label, nearest(curve.points, asked)]);
    const steps = found.map(([, point]) => point[0]);
    const step = steps.reduce((a, b) => (Math.abs(b - asked) < Math.abs(a - asked) ? b : a));
    const words = found.map(([label, [own, value]]) =>
      own === step ? `${label} ${value}` : `${label} ${value} (step ${own})`,
    );
    line.textContent = `step ${step}: ${words.join(" · ")}`;
    const shown = last === first ? 0.5 : (step - first) / (last - first);
    cursor.setAttribute("transform", `translate(${left + shown * (right - left)} 0)`);
    drawn.classList.add("pointed");
  });
  drawn.addEventListener("pointerleave", () => {
    line.textContent = idle;
    drawn.classList.remove("pointed");
  });
}
