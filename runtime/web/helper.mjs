// A thread of a team, in a worker of its own. It receives one message with the objects that all threads share, answers "ready" when it has
// its module instance, and then works without ever returning to its event loop.

import { help } from './team.mjs';

const isNode = typeof process === 'object' && Boolean(process.versions?.node);
const port = isNode ? (await import('node:worker_threads')).parentPort : globalThis;

function begin(shared) {
  const work = help(shared);
  port.postMessage('ready');
  work();
}

if (isNode) port.once('message', begin);
else port.onmessage = ({ data }) => begin(data);
