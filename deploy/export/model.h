/* @NAME@ as compiled by relaxserve for @TARGET@.
 *
 * All memory comes from the caller; the library has no globals and calls nothing. A sequence belongs to one thread at a time; sequences of one
 * model may run on several. A step needs about RS_STACK_BYTES of stack. Reasonably small targets keep weights in flash: they are only read.
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
#define RS_SEQUENCE_BYTES @SEQUENCE_BYTES@u /* what rs_new asks for: arena, keys and values */
#define RS_STACK_BYTES @STACK_BYTES@u
#define RS_EOS { @EOS@ } /* tokens that end an answer */

typedef struct rs_model rs_model;
typedef struct rs_sequence rs_sequence;

/* Memory of so many bytes at a multiple of `alignment`, or NULL. `context` is what rs_open was given. */
typedef void *(*rs_allocate)(void *context, size_t bytes, size_t alignment);
typedef void (*rs_release)(void *context, void *memory);

typedef struct {
  float temperature; /* 0: the most probable token */
  float top_p;       /* 1: all */
  int32_t top_k;     /* 0: all */
  uint64_t seed;     /* the same seed gives the same tokens */
} rs_sampling;

/* `weights`: the content of weights.bin at a multiple of 64; it stays with the caller. NULL if the size or the place is not right, or memory
 * is lacking. */
rs_model *rs_open(const void *weights, size_t weights_bytes, rs_allocate allocate, rs_release release, void *context);

/* An empty sequence; NULL if memory is lacking. */
rs_sequence *rs_new(rs_model *model);

/* Append tokens. The logits after the last one, RS_VOCAB_SIZE floats that the next call overwrites; NULL, with nothing done, if `count` is 0
 * or more than RS_MAX_CONTEXT holds. A token is less than RS_VOCAB_SIZE. */
const float *rs_step(rs_sequence *sequence, const int32_t *tokens, size_t count);

/* A token from the logits of the last step; negative if a logit is not a number. */
int32_t rs_sample(rs_sequence *sequence, const rs_sampling *sampling);

/* Go back to the first `length` tokens. */
void rs_rewind(rs_sequence *sequence, size_t length);

void rs_free(rs_sequence *sequence);
void rs_close(rs_model *model);

#ifdef __cplusplus
}
#endif
#endif
