/* @NAME@ as compiled by relaxserve for @TARGET@.
 *
 * The caller provides all memory and all threads; the library has no global variables and calls no other library. Only one thread at a time may
 * use a sequence, apart from threads in rs_help; several threads may use different sequences of a model. A step needs about RS_STACK_BYTES of
 * stack on each thread. Weights are only read, so small targets can keep them in flash.
 */
#ifndef RS_MODEL_H
#define RS_MODEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RS_VOCAB_SIZE @VOCAB_SIZE@
#define RS_MAX_CONTEXT @MAX_CONTEXT@
#define RS_WEIGHTS_BYTES @WEIGHTS_BYTES@u
#define RS_FINGERPRINT UINT64_C(@FINGERPRINT@) /* fingerprint of the weights of this model */
#define RS_PIECES_BYTES @PIECES_BYTES@u /* size of pieces.bin */
#define RS_SEQUENCE_BYTES @SEQUENCE_BYTES@u /* memory that rs_new allocates: arena, keys and values */
#define RS_STACK_BYTES @STACK_BYTES@u
#define RS_EOS { @EOS@ } /* tokens that end an answer */

typedef struct rs_model rs_model;
typedef struct rs_sequence rs_sequence;

/* Return `bytes` bytes of memory, aligned to `alignment`, or NULL. `context` is the argument of rs_open. */
typedef void *(*rs_allocate)(void *context, size_t bytes, size_t alignment);

/* Free memory that the function of type rs_allocate returned. */
typedef void (*rs_release)(void *context, void *memory);

typedef struct {
  float temperature; /* 0 chooses the most probable token */
  float top_p;       /* 1 allows all tokens */
  int32_t top_k;     /* 0 allows all tokens */
  uint64_t seed;     /* the same seed gives the same tokens */
} rs_sampling;

/* Return the fingerprint of weights, which is stored after them, or 0 if `weights_bytes` is not RS_WEIGHTS_BYTES or `weights` is NULL. Every
 * export writes weights.bin, model.h and the library together; weights of another export have another fingerprint than RS_FINGERPRINT. */
uint64_t rs_fingerprint(const void *weights, size_t weights_bytes);

/* Open the model. `weights` is the content of weights.bin, aligned to 64 bytes; the caller keeps it until rs_close. Return NULL if its size,
 * alignment or fingerprint is wrong, if `weights`, `allocate` or `release` is NULL, or if memory runs out. */
rs_model *rs_open(const void *weights, size_t weights_bytes, rs_allocate allocate, rs_release release, void *context);

/* Create an empty sequence, whose work is cut for `threads` threads: the one that calls rs_step and those in rs_help. Results are the same for
 * every number of threads. Return NULL if `model` is NULL or memory runs out. */
rs_sequence *rs_new(rs_model *model, int32_t threads);

/* Help the thread that calls rs_step and rs_sample. Call this in a loop on `threads - 1` threads of your own, and let them sleep in between:
 * it returns 1 if there was nothing to do for about ten microseconds, and 0 after rs_stop. Fewer threads are slower, but correct. */
int32_t rs_help(rs_sequence *sequence);

/* Make rs_help return 0 on all threads. Join these threads before rs_free. */
void rs_stop(rs_sequence *sequence);

/* Append tokens. Return the logits after the last one: RS_VOCAB_SIZE floats, which the next call overwrites. Return NULL and change nothing if
 * `count` is 0, if the sequence would exceed RS_MAX_CONTEXT, or if a token is negative or not less than RS_VOCAB_SIZE. */
const float *rs_step(rs_sequence *sequence, const int32_t *tokens, size_t count);

/* Draw a token from the logits of the last step. Return a negative number if there was no step yet, if a logit is NaN or positive infinity, or
 * if no token may be drawn. */
int32_t rs_sample(rs_sequence *sequence, const rs_sampling *sampling);

/* Shorten the sequence to its first `length` tokens. A sequence that is not longer stays as it is. */
void rs_rewind(rs_sequence *sequence, size_t length);

/* Give the memory back. Free all sequences of a model before the model. NULL is allowed, and nothing happens. */
void rs_free(rs_sequence *sequence);
void rs_close(rs_model *model);

#ifdef __cplusplus
}
#endif
#endif
