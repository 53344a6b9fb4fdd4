"""The runtime of exported models in JavaScript: ES modules for browsers and Node, without a bundler. An export copies them."""
