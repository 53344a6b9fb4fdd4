/* Parse server-sent events: yield the data of each as text, however the bytes are split into chunks. */
export async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "", data = [];
  for (const reader = body.getReader(); ;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += decoder.decode(value, {stream: true});
    for (let end; (end = rest.indexOf("\n")) >= 0;) {
      const line = rest.slice(0, end).replace(/\r$/, "");
      rest = rest.slice(end + 1);
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
