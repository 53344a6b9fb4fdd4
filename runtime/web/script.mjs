// Make script URLs for workers from files beside a module. If the page requires trusted types, the policy `relaxserve` creates the URLs.

const policy = globalThis.trustedTypes?.createPolicy('relaxserve', { createScriptURL: (url) => url });

/** Return the URL of a script beside the module with the URL `beside`. */
export function scriptUrl(file, beside) {
  const url = new URL(file, beside).href;
  return policy ? policy.createScriptURL(url) : url;
}
