/* The one way to call a kernel, from PyTorch through ctypes (native.py) and from TensorFlow
 * (tensorflow.cc): tensors in, tensors out, integers and reals. calls.c has the table of kernels. */
#ifndef HVD_GRADCOMP_CALLS_H
#define HVD_GRADCOMP_CALLS_H

#include <stdint.h>

#include "kernels.h"

enum { UINT8 = 1, INT64, FLOAT, BOOL };

/* A tensor: `rows` rows of `length` items, `stride` bytes apart; a vector or a scalar has one row.
 *
 * like: of an output, the input whose shape it has and whose memory it may take; else -1. */
typedef struct {
  void *data;
  int64_t dtype, rank, rows, length, stride, like;
} buffer;

typedef struct {
  const buffer *in;
  buffer *out;
  const int64_t *ints;
  const double *floats;
  int64_t n_in, n_out, n_ints, n_floats;
  char *scratch;       /* memory of `scratch_bytes` */
  int64_t scratch_bytes;
  int64_t threads;
} call;

/* Returns the number of a kernel, or -1. */
int kernel_number(const char *name);
/* Checks the inputs and fills in the outputs but for their data, and `scratch_bytes`.
 * Returns 0, or INVALID if an input is not what the kernel takes. */
int kernel_plan(int number, call *c);
/* Runs a planned call. Returns 0, NO_MEMORY or BEYOND. */
int kernel_run(int number, call *c);
/* Plans and runs a call whose outputs have memory.
 *
 * buffers: inputs, then outputs. sizes: n_in, n_out, n_ints, n_floats, bytes of scratch, threads.
 * Returns 0, an error, or how many bytes of scratch it takes, if that is more. */
int64_t kernel_call(int number, buffer *buffers, const int64_t *sizes, const int64_t *ints,
                    const double *floats, void *scratch);
/* Says what is wrong with the last invalid call of this thread. */
const char *kernel_error(void);

#endif
