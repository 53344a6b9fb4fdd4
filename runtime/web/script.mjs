// Addresses of workers. Where a policy of the page demands trusted types, the policy `relaxserve` makes them of files beside this one.

const policy = globalThis.trustedTypes?.createPolicy('relaxserve', { createScriptURL: (url) => url });

export function scriptUrl(file, beside) {
  const url = new URL(file, beside).href;
  return policy ? policy.createScriptURL(url) : url;
}
