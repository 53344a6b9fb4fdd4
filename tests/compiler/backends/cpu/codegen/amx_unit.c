/* Emulates AMX on machines without the unit. The machine code of a kernel runs unchanged, and this handler of SIGILL executes each tile
   instruction as Intel's manual defines it (volume 2, and chapter 18 of volume 1). Any other illegal instruction, and a tile instruction
   that the real unit would refuse, goes to the handler that was installed before. Each thread has its own tiles, as on the unit.

   cc -O2 -shared -fPIC -mavx512f amx_unit.c */

#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 };
enum { CONFIGURED, LOADED, STORED, MULTIPLIED, KINDS };

typedef struct {
    uint8_t palette, rows[TILES], bytes[TILES]; /* the configuration; `bytes` is the length of a row */
    uint8_t data[TILES][ROWS][BYTES];
} Unit;

static __thread Unit unit;
static struct sigaction before;
uint64_t amx_counts[KINDS]; /* summed over all threads since the library was loaded */

static void count(int kind) { __atomic_fetch_add(&amx_counts[kind], 1, __ATOMIC_RELAXED); }

/* --- instructions; each function returns why the real unit would refuse the instruction, or null if it was executed --- */

static const char *configure(const uint8_t *memory) {
    Unit next = {0};
    count(CONFIGURED);
    if (memory[0] > 1) return "palette";
    for (int i = 1; i < 64; i++) {
        int size = i >= 16 && i < 32, height = i >= 48 && i < 56;
        if (memory[i] && (!memory[0] || !(size || height))) return "reserved byte of the configuration";
    }
    next.palette = memory[0];
    for (int t = 0; t < TILES; t++) {
        uint16_t bytes;
        memcpy(&bytes, memory + 16 + 2 * t, 2);
        next.rows[t] = memory[48 + t];
        if (bytes > BYTES || next.rows[t] > ROWS || !bytes != !next.rows[t]) return "size of a tile";
        next.bytes[t] = bytes;
    }
    unit = next; /* this also clears the tiles */
    return 0;
}

static const char *store_configuration(uint8_t *memory) {
    memset(memory, 0, 64);
    memory[0] = unit.palette;
    for (int t = 0; t < TILES; t++) memory[16 + 2 * t] = unit.bytes[t], memory[48 + t] = unit.rows[t];
    return 0;
}

static const char *move(int tile, uint8_t *base, int64_t stride, int store) {
    count(store ? STORED : LOADED);
    if (!unit.palette || !unit.rows[tile]) return "tile that is not configured";
    for (int r = 0; r < unit.rows[tile]; r++) {
        uint8_t *row = unit.data[tile][r], *memory = base + r * stride;
        store ? memcpy(memory, row, unit.bytes[tile]) : memcpy(row, memory, unit.bytes[tile]);
    }
    return 0;
}

static const char *multipliable(int c, int a, int b) {
    count(MULTIPLIED);
    if (!unit.palette) return "product without a configuration";
    if (c == a || c == b || a == b) return "product of a tile with itself";
    if ((unit.bytes[c] | unit.bytes[a] | unit.bytes[b]) % 4) return "row that is no multiple of four bytes";
    if (!unit.rows[c] || !unit.rows[a] || !unit.rows[b]) return "product of a tile that is not configured";
    if (unit.rows[c] != unit.rows[a] || unit.bytes[a] / 4 != unit.rows[b] || unit.bytes[c] != unit.bytes[b]) return "sizes of a product";
    return 0;
}

static __m512i line(int tile, int row) { return _mm512_loadu_si512(unit.data[tile][row]); }

static int32_t word(int tile, int row, int k) {
    int32_t value;
    memcpy(&value, unit.data[tile][row] + 4 * k, 4);
    return value;
}

/* Denormals count as zero, sums round to nearest even, and first and second elements of pairs have separate sums. */
__attribute__((noinline)) static void multiply_bf16(int c, int a, int b) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (int m = 0; m < unit.rows[c]; m++) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int k = 0; k < unit.bytes[a] / 4; k++) {
            __m512i left = _mm512_set1_epi32(word(a, m, k)), right = line(b, k);
            first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), first);
            second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, upper)), _mm512_castsi512_ps(_mm512_and_si512(right, upper)), second);
        }
        __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(line(c, m)), _mm512_add_ps(first, second));
        _mm512_storeu_ps(unit.data[c][m], sum);
    }
}

static __m512i byte_of(__m512i words, int i, int is_signed) {
    words = _mm512_sll_epi32(words, _mm_cvtsi32_si128(24 - 8 * i));
    return is_signed ? _mm512_srai_epi32(words, 24) : _mm512_srli_epi32(words, 24);
}

static void multiply_bytes(int c, int a, int b, int a_signed, int b_signed) {
    for (int m = 0; m < unit.rows[c]; m++) {
        __m512i sum = line(c, m);
        for (int k = 0; k < unit.bytes[a] / 4; k++) {
            __m512i left = _mm512_set1_epi32(word(a, m, k)), right = line(b, k);
            for (int i = 0; i < 4; i++) sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(byte_of(left, i, a_signed), byte_of(right, i, b_signed)));
        }
        _mm512_storeu_si512(unit.data[c][m], sum);
    }
}

static const char *multiply(int opcode, int prefix, int c, int a, int b) {
    const char *fault = multipliable(c, a, b);
    if (fault) return fault;
    if (opcode == 0x5e) {
        multiply_bytes(c, a, b, prefix & 2, prefix & 1); /* signs of a and b by prefix: none uu, 66 us, F3 su, F2 ss */
        return 0;
    }
    uint32_t mode = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* flush to zero, denormals are zero, round to nearest, exceptions masked */
    multiply_bf16(c, a, b);
    _mm_setcsr(mode);
    return 0;
}

/* --- decoding --- */

typedef struct {
    int prefix, opcode, mod, reg, rm, other, length; /* prefix: 0 none, 1 66, 2 F3, 3 F2 */
    uint8_t *base;
    int64_t index;
} Instruction;

/* All tile instructions have this encoding: three-byte VEX, map 0F38, 128 bits, W0. */
static int decode(const uint8_t *code, const greg_t *registers, Instruction *out) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || code[2] & 0x84) return 0;
    int index_high = code[1] & 0x40 ? 0 : 8, base_high = code[1] & 0x20 ? 0 : 8;
    out->prefix = code[2] & 3, out->other = ~code[2] >> 3 & 15;
    out->opcode = code[3], out->mod = code[4] >> 6, out->reg = code[4] >> 3 & 7, out->rm = code[4] & 7;
    if (!(code[1] & 0x80) || out->other > 7) return 0;
    out->length = 5;
    if (out->mod == 3) return 1;
    int base = out->rm + base_high, disp_size = out->mod == 1 ? 1 : out->mod == 2 ? 4 : 0;
    int64_t at = 0, disp = 0;
    out->index = 0;
    if (out->rm == 4) {
        uint8_t sib = code[out->length++];
        int index = (sib >> 3 & 7) + index_high;
        base = (sib & 7) + base_high;
        if (index != 4) out->index = registers[order[index]] * ((int64_t)1 << (sib >> 6));
        if ((sib & 7) == 5 && out->mod == 0) base = -1, disp_size = 4;
    } else if (out->rm == 5 && out->mod == 0) {
        base = -2, disp_size = 4;
    }
    if (disp_size == 1) disp = (int8_t)code[out->length];
    if (disp_size == 4) { int32_t far; memcpy(&far, code + out->length, 4); disp = far; }
    out->length += disp_size;
    if (base >= 0) at = registers[order[base]];
    if (base == -2) at = (int64_t)code + out->length; /* relative to the next instruction */
    out->base = (uint8_t *)(at + disp);
    return 1;
}

/* Execute an instruction. Return why the real unit would refuse it, or null. Set `known` if it is a tile instruction. */
static const char *carry_out(const Instruction *i, int *known) {
    int memory = i->mod != 3, tiled = memory && i->rm == 4;
    *known = 1;
    if (i->opcode == 0x49 && memory && !i->reg && !i->other && i->prefix == 0) return configure(i->base);
    if (i->opcode == 0x49 && memory && !i->reg && !i->other && i->prefix == 1) return store_configuration(i->base);
    if (i->opcode == 0x49 && !memory && !i->reg && !i->rm && i->prefix == 0) { memset(&unit, 0, sizeof unit); return 0; }
    if (i->opcode == 0x49 && !memory && !i->rm && i->prefix == 3) {
        if (!unit.palette || !unit.rows[i->reg]) return "tile that is not configured";
        memset(unit.data[i->reg], 0, ROWS * BYTES);
        return 0;
    }
    if (i->opcode == 0x4b && tiled && !i->other && i->prefix) return move(i->reg, i->base, i->index, i->prefix == 2);
    if ((i->opcode == 0x5c && !memory && i->prefix == 2) || (i->opcode == 0x5e && !memory))
        return multiply(i->opcode, i->prefix, i->reg, i->rm, i->other);
    *known = 0;
    return 0;
}

static void refused(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    Instruction instruction = {0};
    int known = 0;
    const char *fault = 0;
    (void)info;
    if (decode((const uint8_t *)registers[REG_RIP], registers, &instruction)) fault = carry_out(&instruction, &known);
    if (known && !fault) {
        registers[REG_RIP] += instruction.length;
        return;
    }
    if (fault) {
        static const char told[] = "AMX: the unit would refuse this: ";
        if (write(2, told, sizeof told - 1) < 0 || write(2, fault, strlen(fault)) < 0 || write(2, "\n", 1) < 0) _exit(1);
    }
    sigaction(signal, &before, 0); /* the instruction faults again, and the previous handler gets it */
}

int amx_install(void) {
    struct sigaction ours = {0};
    ours.sa_sigaction = refused;
    ours.sa_flags = SA_SIGINFO;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGILL, &ours, &before);
}
