/* The list of endpoints, built from /openapi.json. */

import {ask, key} from "./core/api.js";
import {find, h} from "./core/dom.js";
import {parseInline} from "./text/inline.js";
import {inline} from "./text/render.js";

const followed = (schema, all) => schema?.$ref ? all[schema.$ref.split("/").pop()] : schema;

/* Return the type of a schema in words. `all`: the schemas to which references lead, by name. */
function kind(schema, all) {
  schema = followed(schema, all) ?? {};
  if (schema.anyOf) return [...new Set(schema.anyOf.map(one => kind(one, all)).filter(one => one !== "null"))].join(" or ");
  if (schema.enum) return schema.enum.map(one => JSON.stringify(one)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${kind(schema.items, all)}`;
  const low = schema.minimum ?? schema.exclusiveMinimum, high = schema.maximum ?? schema.exclusiveMaximum;
  const known = bound => bound !== undefined && Math.abs(bound) < 1e9;
  const range = known(low) && known(high) ? ` ${low} to ${high}` : known(low) ? ` from ${low}` : "";
  return (schema.type ?? "any") + range;
}

/* Return the name and the type of each property of a schema, and whether it is required. Of several schemas, the first one counts. */
function properties(schema, all) {
  schema = followed(schema, all);
  if (schema?.anyOf) schema = followed(schema.anyOf[0], all);
  return Object.entries(schema?.properties ?? {}).map(([name, one]) => [name, kind(one, all), schema.required?.includes(name)]);
}

function table(rows) {
  const table = h("table");
  for (const [name, type, required] of rows) {
    const row = table.insertRow(), cell = row.insertCell();
    cell.append(h("code", {}, name), required ? " required" : "");
    row.insertCell().textContent = type;
  }
  return table;
}

/* Return the table of an endpoint's parameters and of the fields of its body. */
function asked(operation, all) {
  const rows = (operation.parameters ?? []).map(p => [p.name, kind(p.schema, all), p.required]);
  return [table([...rows, ...properties(operation.requestBody?.content?.["application/json"]?.schema, all)])];
}

/* Return the path of every value of an answer, such as `choices[].message.content`, with its type. */
function values(schema, all, path = "") {
  schema = followed(schema, all) ?? {};
  const some = (schema.anyOf ?? []).filter(one => one.type !== "null");
  if (some.length === 1) return values(some[0], all, path);
  if (schema.properties) return Object.entries(schema.properties).flatMap(([name, one]) => values(one, all, path ? `${path}.${name}` : name));
  const inner = schema.type === "array" ? values(schema.items, all, `${path}[]`) : [];
  return inner.length > 1 ? inner : [[path, kind(schema, all)]];
}

/* Return the shape of an element of a stream: of the data of an event, or of a line. */
function streamed(itemSchema, all) {
  const data = followed(itemSchema, all).properties.data;
  return (data?.anyOf?.[0] ?? data)?.contentSchema ?? itemSchema;
}

/* Return a title and a table for each kind of answer of an endpoint, or only a title with the type if the answer is a single value. */
function answered(operation, all) {
  const ways = Object.values(operation.responses?.["200"]?.content ?? {}).flatMap(({schema, itemSchema}) =>
    itemSchema ? [["Each part of a stream", streamed(itemSchema, all)]] : (schema?.anyOf ?? [schema]).map(one => ["Answer", one]));
  return ways.flatMap(([title, schema]) => {
    const rows = values(schema, all);
    return rows.length > 1 ? [h("h3", {}, title), table(rows)] : [h("h3", {}, `${title}: ${rows[0]?.[1] ?? ""}`)];
  });
}

async function load() {
  let described;
  try {
    described = await ask("/openapi.json");
  } catch (error) {
    find("#ask").hidden = !error.needsKey;
    find("#paths").replaceChildren(h("p", {role: "alert"}, error.message));
    return;
  }
  const all = described.components?.schemas ?? {}, groups = {};
  for (const [path, operations] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(operations)) (groups[operation.tags?.[0] ?? "Other"] ??= []).push([method, path, operation]);
  }
  find("#paths").replaceChildren(...Object.entries(groups).flatMap(([group, list]) => [h("h2", {}, group), ...list.map(one => endpoint(...one, all))]));
}

/* Return the entry of one endpoint. Its fields and answers are drawn when it is opened. */
function endpoint(method, path, operation, all) {
  const box = h("details", {}, h("summary", {}, h("b", {}, method.toUpperCase()), h("code", {}, path), h("span", {}, inline(parseInline(operation.description ?? "")))));
  box.addEventListener("toggle", () => box.append(...asked(operation, all), ...answered(operation, all)), {once: true});
  return box;
}

find("#key").value = key.get();
find("#ask").addEventListener("submit", event => event.preventDefault());
find("#key").addEventListener("change", () => {
  key.set(find("#key").value.trim());
  load();
});
load();
