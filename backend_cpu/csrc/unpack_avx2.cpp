// unpack.h for AVX2.
#include "unpack_block.inc.h"

namespace hal_cpu {
const UnpackKernels kUnpackAvx2 = {rows, columns, awq, turn};
}  // namespace hal_cpu
