/* The cards of the models page: a loaded model with its actions, a running load, a failed load. */

import {address} from "../core/api.js";
import {h, icon, iconButton} from "../core/dom.js";
import {bytes, seconds} from "../core/format.js";

const PARTS = {weights: "weights", kv_cache: "KV cache up to", arena: "work space"};
const NEUTRAL = {top_p: 1, top_k: 0, min_p: 0, typical_p: 1, repetition_penalty: 1};  // sampling parameters without effect
const IS_WELL = new Set(["ready", "sleeping"]);

/* `acts`: unload(model), addAlias(model, alias), removeAlias(alias), log(model) */
export function modelCard(model, acts) {
  const {resident_bytes: held, planned_bytes: planned, bound_bytes: bound} = model.memory;
  const facts = [
    ["Context", model.max_model_len && `${model.max_model_len.toLocaleString("en")} tokens`],
    ["Reads", kindsOf(model)],
    ["Weights", `${model.quantize} for ${model.target}`],
    ["Quality", model.quality && quality(model.quality)],
    ["Sampling", model.sampling && sampling(model.sampling)],
    ["Memory now", held ? bytes(held) : null],
    ["Memory without requests", planned ? bytes(planned) : "none"],
    ["Memory at most", bound ? `${bytes(bound)}: ${Object.entries(model.bytes).map(([part, size]) => `${PARTS[part] ?? part} ${bytes(size)}`).join(", ")}` : null],
    ["KV pages", model.pages && `${model.pages.used.toLocaleString("en")} of ${model.pages.total.toLocaleString("en")} in use`],
    ["Requests", model.running !== undefined && `${model.running} running, ${model.waiting} waiting`],
    ["Loaded in", model.load_s !== undefined && `${seconds(model.load_s)}${model.cache_hit ? ", from the cache" : `, ${seconds(model.compile_s)} of it compiling`}`],
    ["Restarts", model.restarts || null],
    ["Source", model.source],
  ];
  return h("article", {class: "card", "aria-label": model.id, "data-words": [model.id, ...model.aliases, model.source].join(" ")},
    h("header", {class: "row wrap"}, h("h2", {}, model.id), state(model.state, IS_WELL.has(model.state)),
      model.generates === false && h("span", {class: "pill"}, "embeddings"), model.pin && h("span", {class: "pill"}, "pinned"), h("span", {class: "grow"}),
      model.web && h("a", {class: "button outline", href: address(model.web)}, "Run in this browser"),
      h("button", {type: "button", class: "plain", onclick: () => acts.log(model)}, "Load log"),
      h("button", {type: "button", class: "outline", onclick: () => acts.unload(model)}, "Unload")),
    model.context_note && h("p", {class: "faint small"}, model.context_note),
    model.embedding_note && h("p", {class: "notice"}, model.embedding_note),
    model.restarting && h("p", {class: "fault-box"}, `Its worker has ended and is being restarted: ${model.restarting.error ?? "trying"}`),
    h("dl", {class: "facts"}, facts.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {class: "number"}, value)))),
    aliases(model, acts));
}

/* Return in words what a loaded model reads beside text; null if nothing. */
function kindsOf(model) {
  const kinds = [...model.sees ? ["images"] : [], ...model.listens ? ["audio"] : []];
  return model.hears ? "speech, which it transcribes" : kinds.length && ["text", ...kinds].join(", ");
}

/* Return a quality label in words: how far the predictions are from those of the model's exact weights. */
const quality = ({kl_divergence: kl, top1_agreement: top1, perplexity, exact_perplexity: exact}) =>
  `KL ${kl.toExponential(1)}, top-1 ${(100 * top1).toFixed(1)} %, perplexity ${perplexity.toPrecision(4)} (exact weights ${exact.toPrecision(4)})`;

const sampling = values => Object.entries(values).filter(([name, value]) => name === "temperature" || value !== NEUTRAL[name])
  .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");

function aliases(model, acts) {
  const field = h("input", {"aria-label": `New alias of ${model.id}`, placeholder: "Add an alias", required: true, maxlength: 128, size: 14});
  return h("form", {class: "row wrap aliases", onsubmit: event => { event.preventDefault(); acts.addAlias(model, field.value.trim()); }},
    h("span", {class: "faint small"}, model.aliases.length ? "Aliases" : "No alias"),
    model.aliases.map(alias => h("span", {class: "pill with-button"}, alias, iconButton("close", `Remove alias ${alias}`, () => acts.removeAlias(alias), {class: "icon-button small"}))),
    field, h("button", {class: "plain"}, "Add"));
}

/* Return the card of a running load, with the seconds of each stage so far, or of a running download, with its bytes; and the function that
   shows its progress. The button stays the same element, because a click on one that is replaced meanwhile is lost. */
export function loadCard(operation, cancel) {
  const isDownload = operation.kind === "download", label = `${isDownload ? "Download" : "Load"} of ${operation.model}`;
  const bar = h("i"), stage = h("span"), details = h("div");
  const progress = h("div", {class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100}, bar);
  const card = h("article", {class: "card", "aria-label": label},
    h("header", {class: "row wrap"}, h("h2", {}, operation.model), stage, h("span", {class: "grow"}),
      h("button", {type: "button", class: "outline", onclick: cancel}, isDownload ? "Stop" : "Cancel")),
    progress, details);
  const show = now => {
    bar.style.width = `${100 * now.fraction}%`;
    progress.setAttribute("aria-valuenow", Math.round(100 * now.fraction));
    stage.replaceChildren(state(isDownload ? "download" : now.stage, true));
    details.replaceChildren(isDownload ? h("p", {class: "faint small number"}, arrived(now)) : stages(now));
  };
  show(operation);
  return {card, show};
}

const arrived = ({total_bytes: total, completed_bytes: completed}) =>
  total ? `${bytes(completed)} of ${bytes(total)}. A stopped download continues with the first file that is missing.` : "Waiting for the size of the download";

export function failedDownload(operation, again) {
  const card = h("article", {class: "card", "aria-label": `Failed download of ${operation.model}`},
    h("header", {class: "row wrap"}, h("h2", {}, operation.model), state("failed", false), h("span", {class: "grow"}),
      h("button", {type: "button", class: "plain", onclick: () => card.remove()}, "Dismiss"),
      h("button", {type: "button", class: "outline", onclick: () => { card.remove(); again(); }}, icon("again"), "Continue")),
    h("p", {class: "fault-text"}, operation.error.message));
  return card;
}

export function failedCard(operation, again) {
  return h("article", {class: "card", "aria-label": `Failed load of ${operation.model}`, "data-words": operation.model},
    h("header", {class: "row wrap"}, h("h2", {}, operation.model), state("failed", false), h("span", {class: "grow"}),
      h("button", {type: "button", class: "outline", onclick: again}, icon("again"), "Load again")),
    h("p", {class: "fault-text"}, operation.error.message), stages(operation));
}

/* Return the stages of a load with their seconds, as bars on one scale. */
export function stages(operation) {
  const all = Object.entries(operation.stages), longest = Math.max(0.001, ...all.map(([, spent]) => spent));
  return h("ol", {class: "stages"}, all.map(([stage, spent]) => {
    const bar = h("i");
    bar.style.width = `${100 * spent / longest}%`;
    return h("li", {}, h("span", {}, stage), h("span", {class: "track"}, bar), h("span", {class: "number faint"}, seconds(spent)));
  }));
}

const state = (text, isWell) => h("span", {class: isWell ? "pill is-well" : "pill is-ill"}, text);
