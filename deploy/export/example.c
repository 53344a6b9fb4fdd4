/* Answer a question on all cores:  @BUILD@ && ./example
 * Pass another prompt as token ids:  ./example 1 276 201
 */
#define _DEFAULT_SOURCE
#include "model.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MOST_THREADS 64

static void *allocate(void *context, size_t bytes, size_t alignment) {
  (void)context;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void release(void *context, void *memory) {
  (void)context;
  free(memory);
}

static void *help(void *sequence) {
  while (rs_help(sequence)) usleep(50);
  return NULL;
}

static unsigned char *read_file(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  *bytes = (size_t)ftell(file);
  rewind(file);
  unsigned char *content = allocate(NULL, *bytes, 64);
  if (content && fread(content, 1, *bytes, file) != *bytes) content = NULL;
  fclose(file);
  return content;
}

/* pieces.bin holds a 16-bit length for each token, followed by the bytes of all tokens. */
static void print_token(const unsigned char *pieces, int32_t token) {
  size_t at = 2 * (size_t)RS_VOCAB_SIZE;
  for (int32_t i = 0; i < token; i++) at += pieces[2 * i] | (size_t)pieces[2 * i + 1] << 8;
  fwrite(pieces + at, 1, pieces[2 * token] | (size_t)pieces[2 * token + 1] << 8, stdout);
}

int main(int argc, char **argv) {
  static const int32_t question[] = { @PROMPT@ }, eos[] = RS_EOS;
  static int32_t prompt[RS_MAX_CONTEXT];
  size_t count = argc > 1 ? (size_t)argc - 1 : sizeof question / sizeof *question, weights_bytes, pieces_bytes;
  if (count >= RS_MAX_CONTEXT) return fprintf(stderr, "the prompt has %zu tokens; expected at most %d\n", count, RS_MAX_CONTEXT - 1), 1;
  for (size_t i = 0; i < count; i++) prompt[i] = argc > 1 ? atoi(argv[i + 1]) : question[i];

  unsigned char *weights = read_file("weights.bin", &weights_bytes), *pieces = read_file("pieces.bin", &pieces_bytes);
  if (!weights || !pieces) return fprintf(stderr, "weights.bin and pieces.bin must be in this folder\n"), 1;
  if (weights_bytes != RS_WEIGHTS_BYTES)
    return fprintf(stderr, "weights.bin has %zu bytes; expected %zu: copy the file of this export\n", weights_bytes, (size_t)RS_WEIGHTS_BYTES), 1;
  if (rs_fingerprint(weights, weights_bytes) != RS_FINGERPRINT)
    return fprintf(stderr, "weights.bin has the fingerprint %016" PRIx64 "; expected %016" PRIx64 ": copy the file of this export\n",
                   rs_fingerprint(weights, weights_bytes), RS_FINGERPRINT), 1;
  if (pieces_bytes != RS_PIECES_BYTES)
    return fprintf(stderr, "pieces.bin has %zu bytes; expected %zu: copy the file of this export\n", pieces_bytes, (size_t)RS_PIECES_BYTES), 1;
  rs_model *model = rs_open(weights, weights_bytes, allocate, release, NULL);
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  int threads = cores < 1 ? 1 : cores > MOST_THREADS ? MOST_THREADS : (int)cores, helpers = 0;
  rs_sequence *sequence = model ? rs_new(model, threads) : NULL;
  if (!sequence) return fprintf(stderr, "a sequence needs %zu bytes; this is more than the memory that is left\n", (size_t)RS_SEQUENCE_BYTES), 1;
  pthread_t started[MOST_THREADS];
  while (helpers < threads - 1 && !pthread_create(&started[helpers], NULL, help, sequence)) helpers++;

  rs_sampling sampling = { .temperature = 0, .top_p = 1, .top_k = 0, .seed = 0 };
  const float *logits = rs_step(sequence, prompt, count);
  int status = !logits;
  if (!logits) fprintf(stderr, "a token of the prompt is out of range; expected numbers from 0 to %d\n", RS_VOCAB_SIZE - 1);
  while (logits) {
    int32_t token = rs_sample(sequence, &sampling);
    int ends = token < 0;
    for (size_t i = 0; i < sizeof eos / sizeof *eos; i++) ends |= token == eos[i];
    if (ends) break;
    print_token(pieces, token);
    fflush(stdout);
    logits = rs_step(sequence, &token, 1);
  }
  printf("\n");
  rs_stop(sequence);
  for (int i = 0; i < helpers; i++) pthread_join(started[i], NULL);
  rs_free(sequence);
  rs_close(model);
  free(weights);
  free(pieces);
  return status;
}
