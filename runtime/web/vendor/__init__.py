"""Third-party modules, unchanged from npm.

tokenizers.mjs    @huggingface/tokenizers 0.2.0, dist/tokenizers.min.mjs, Apache-2.0
jinja.mjs         @huggingface/jinja 0.5.11, dist/index.js, MIT
"""

SHA256 = {
    "tokenizers.mjs": "258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a",
    "jinja.mjs": "c8871915dfa68f976c11540c33fc9341c0810ebe29adb7027b8d51f2a8044936",
}
