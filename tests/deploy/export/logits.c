/* logits THREADS COUNT IDS...: decode greedily on THREADS threads; write the logits of each step, and the tokens to stderr. Exit with status 2 if a promise of
 * model.h is broken. */
#define _DEFAULT_SOURCE
#include "model.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPECT(x) if (!(x)) return fprintf(stderr, "line %d: " #x "\n", __LINE__), 2

static int blocks, budget = 1000;

static void *allocate(void *context, size_t bytes, size_t alignment) {
  if (context != &blocks || budget-- <= 0) return NULL;
  blocks++;
  void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory) memset(memory, 0xA5, bytes);
  return memory;
}

static void release(void *context, void *memory) {
  if (context == &blocks) blocks--;
  free(memory);
}

static void *help(void *sequence) {
  while (rs_help(sequence)) usleep(50);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t started[16];
  static int32_t prompt[RS_MAX_CONTEXT + 1];
  int threads = atoi(argv[1]), steps = atoi(argv[2]), count = argc - 3;
  for (int i = 0; i < count; i++) prompt[i] = atoi(argv[i + 3]);
  unsigned char *weights = aligned_alloc(64, RS_WEIGHTS_BYTES + 64);
  FILE *file = fopen("weights.bin", "rb");
  EXPECT(file && fread(weights, 1, RS_WEIGHTS_BYTES, file) == RS_WEIGHTS_BYTES && fgetc(file) == EOF);
  fclose(file);

  EXPECT(!rs_open(weights, RS_WEIGHTS_BYTES - 1, allocate, release, &blocks));
  EXPECT(!rs_open(weights + 4, RS_WEIGHTS_BYTES, allocate, release, &blocks));
  EXPECT(!rs_open(NULL, RS_WEIGHTS_BYTES, allocate, release, &blocks) && !rs_open(weights, RS_WEIGHTS_BYTES, NULL, release, &blocks));
  EXPECT(!rs_open(weights, RS_WEIGHTS_BYTES, allocate, NULL, &blocks));
  EXPECT(rs_fingerprint(weights, RS_WEIGHTS_BYTES) == RS_FINGERPRINT);
  EXPECT(!rs_fingerprint(NULL, RS_WEIGHTS_BYTES) && !rs_fingerprint(weights, RS_WEIGHTS_BYTES - 1));
  weights[RS_WEIGHTS_BYTES - 1] ^= 1; /* as weights of another model */
  EXPECT(!rs_open(weights, RS_WEIGHTS_BYTES, allocate, release, &blocks));
  weights[RS_WEIGHTS_BYTES - 1] ^= 1;
  EXPECT(blocks == 0);
  rs_free(NULL);
  rs_close(NULL);
  EXPECT(!rs_new(NULL, threads));
  budget = 1;
  rs_model *model = rs_open(weights, RS_WEIGHTS_BYTES, allocate, release, &blocks);
  EXPECT(model && !rs_new(model, threads));
  budget = 2;
  rs_sequence *sequence = rs_new(model, threads), *other = rs_new(model, 0); /* `other` is used by one thread */
  EXPECT(sequence && other && blocks == 3);
  for (int i = 1; i < threads; i++) EXPECT(!pthread_create(&started[i], NULL, help, sequence));

  EXPECT(!rs_step(sequence, prompt, 0) && !rs_step(sequence, prompt, RS_MAX_CONTEXT + 1) && !rs_step(sequence, prompt, (size_t)-1));
  int32_t unknown[][2] = { { 0, RS_VOCAB_SIZE }, { -1, 0 }, { 0, INT32_MAX } };
  for (int i = 0; i < 3; i++) EXPECT(!rs_step(sequence, unknown[i], 2));
  rs_sampling greedy = { 0, 1, 0, 0 };
  EXPECT(rs_sample(other, &greedy) < 0); /* there are no logits yet */
  EXPECT(rs_step(other, prompt, 1) && rs_sample(other, &greedy) >= 0);
  const float *logits = rs_step(sequence, prompt, count);
  for (int i = 0; i < steps; i++) {
    EXPECT(logits);
    fwrite(logits, sizeof(float), RS_VOCAB_SIZE, stdout);
    int32_t token = rs_sample(sequence, &greedy);
    fprintf(stderr, "%d ", token);
    if (i == 3) { /* sequences are independent, and decoding after a rewind gives the same logits */
      EXPECT(rs_step(other, &token, 1) && rs_step(sequence, &token, 1) && rs_step(sequence, &token, 1));
      rs_rewind(sequence, count + 3);
    }
    logits = rs_step(sequence, &token, 1);
  }
  rs_sampling warm = { 2, 0.95f, 50, 7 };
  EXPECT(rs_sample(sequence, &warm) == rs_sample(sequence, &warm));
  rs_stop(sequence);
  for (int i = 1; i < threads; i++) EXPECT(!pthread_join(started[i], NULL));
  EXPECT(!rs_help(sequence));
  rs_free(sequence);
  rs_free(other);
  rs_close(model);
  EXPECT(blocks == 0);
  return 0;
}
