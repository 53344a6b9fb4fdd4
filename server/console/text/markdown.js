/* Parse Markdown into plain values, in time linear in the text. HTML is treated as text.

   parse(text) returns blocks. A top-level block has its `source` and does not depend on its neighbours:
     {type: "heading", level, inline}   {type: "paragraph", inline}   {type: "code", language, text, isOpen}   {type: "rule"}
     {type: "quote", blocks}   {type: "list", start, items: [{checked, blocks}]}   {type: "table", align, head, rows}
   `start` is null for bullet lists; `checked` is null for items that are no tasks. Inline values are those of inline.js. */

import {parseInline} from "./inline.js";

const DEEPEST = 12;  // levels of nested lists and quotes; deeper text becomes a paragraph
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\] +/;

export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  return blocks(lines, 0, true);
}

function blocks(lines, depth, withSource = false) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const {block, end} = blockAt(lines, at, depth);
    if (withSource) block.source = lines.slice(at, end).join("\n");
    found.push(block);
    at = end;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").trimEnd().replace(/(^|[^#\\])#+$/, "$1").trim();
    return {block: {type: "heading", level: heading[1].length, inline: parseInline(text)}, end: at + 1};
  }
  if (RULE.test(line)) return {block: {type: "rule"}, end: at + 1};
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (MARKER.test(line)) return list(lines, at, depth);
  }
  return table(lines, at) ?? paragraph(lines, at, depth);
}

function code(lines, at, [opening, fence, language]) {
  const indent = opening.indexOf(fence), closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const inner = lines.slice(at + 1, end).map(line => line.slice(Math.min(indent, leading(line))));
  const block = {type: "code", language: language.trim().split(/\s/)[0].toLowerCase(), text: inner.join("\n"), isOpen: end === lines.length};
  return {block, end: Math.min(end + 1, lines.length)};
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
    else if (lines[end].trim() && continues(lines[end]) && inner.at(-1).trim()) inner.push(lines[end]);  // the quoted paragraph continues
    else break;
  }
  return {block: {type: "quote", blocks: blocks(inner, depth + 1)}, end};
}

/* Models indent the contents of an item by two, three or four spaces, whatever its marker, so two are enough. */
function list(lines, at, depth) {
  const [, lead, marker] = MARKER.exec(lines[at]), kind = marker.at(-1), outer = lead.length;
  const items = [];
  let end = at, item = null, isAfterBlank = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end], found = MARKER.exec(line);
    if (!line.trim()) {
      isAfterBlank = true;
      item.push("");
      continue;
    }
    const indent = leading(line);
    if (found && indent < outer + 2) {
      if (found[2].at(-1) !== kind || RULE.test(line)) break;
      item = [line.slice(found[0].length)];
      item.width = found[0].length;
      items.push(item);
    } else if (indent >= outer + 2) {
      item.push(line.slice(Math.min(indent, item.width)));
    } else if (!isAfterBlank && continues(line)) {
      item.push(line);
    } else {
      break;
    }
    isAfterBlank = false;
  }
  while (end > at && !lines[end - 1].trim()) end -= 1;  // blank lines at the end do not belong to the item
  return {block: {type: "list", start: /\d/.test(marker) ? parseInt(marker, 10) : null, items: items.map(one => listItem(one, depth))}, end};
}

function listItem(lines, depth) {
  const task = TASK.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  return {checked: task ? task[1] !== " " : null, blocks: blocks([...lines], depth + 1)};
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !/^[ |:-]+$/.test(lines[at + 1])) return null;
  const head = cells(lines[at]), marks = cells(lines[at + 1]);
  if (head.length !== marks.length || !marks.every(mark => /^:?-+:?$/.test(mark))) return null;
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => parseInline(row[column] ?? "")));
  }
  const align = marks.map(mark => mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left");
  return {block: {type: "table", align, head: head.map(cell => parseInline(cell)), rows}, end};
}

/* Split a table row at its bars, except escaped ones and those inside code. */
function cells(line) {
  const found = [""], text = line.trim();
  let ticks = false;
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !ticks) {
      if (at < text.length - 1) found.push("");
    } else {
      if (text[at] === "`") ticks = !ticks && text.indexOf("`", at + 1) >= 0;
      found[found.length - 1] += text[at];
    }
  }
  return found.map(cell => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && continues(lines[end]) && !isTable(lines, end)) end += 1;
  const inner = lines.slice(at, end).map((line, index) => index < end - at - 1 ? line.trimStart() : line.trim());
  return {block: {type: "paragraph", inline: parseInline(inner.join("\n"))}, end};
}

/* Return whether a line continues the paragraph above it. */
function continues(line) {
  return line.trim() !== "" && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !QUOTE.test(line) && !beginsList(line);
}

function beginsList(line) {
  const found = MARKER.exec(line);
  return found !== null && found[3] !== "" && (!/\d/.test(found[2]) || parseInt(found[2], 10) === 1);
}

const isTable = (lines, at) => lines[at].includes("|") && table(lines, at) !== null;

const leading = line => line.length - line.trimStart().length;
