// unpack.h for any x86-64, and for checks of the other: the same source, without its instructions.
#include "unpack_block.inc.h"

namespace hal_cpu {
const UnpackKernels kUnpackPlain = {rows, columns, awq, turn};
}  // namespace hal_cpu
