/* The memory of all models as a bar, and as a list for screen readers. */

import {h} from "../core/dom.js";
import {bytes} from "../core/format.js";

const NUM_COLOURS = 4;

/* Return the card for an answer of /admin/memory. The bar shows what the models take at most, with full KV caches. Without a limit, the full bar is the memory in use. */
export function memoryBar({limit_bytes: limit, used_bytes: used, resident_bytes: resident, free_bytes: free, models}) {
  const shares = Object.entries(models).map(([name, parts]) => ({name, size: Object.values(parts).reduce((sum, part) => sum + part, 0)}));
  const whole = Math.max(limit ?? used, 1);
  const bar = h("div", {class: "memory-bar", "aria-hidden": "true"}, shares.map(({name, size}, at) => {
    const piece = h("i", {class: `series-${at % NUM_COLOURS + 1}`, title: `${name}: ${bytes(size)}`});
    piece.style.width = `${100 * size / whole}%`;
    return piece;
  }));
  const legend = h("ul", {class: "memory-legend"},
    shares.map(({name, size}, at) => h("li", {}, h("i", {class: `series-${at % NUM_COLOURS + 1}`}), `${name} `, h("span", {class: "faint number"}, bytes(size)))),
    limit !== null && h("li", {}, h("i"), "free ", h("span", {class: "faint number"}, bytes(free))));
  return h("section", {class: "card", "aria-label": "Memory"},
    h("header", {class: "row wrap"}, h("h2", {class: "grow"}, "Memory"),
      h("span", {class: "number faint"}, `${bytes(resident)} now, at most ${bytes(used)}${limit === null ? "" : ` of ${bytes(limit)}`}`)),
    bar, legend);
}
