// The kernels for AMX: bytes and bf16. Like the other units, nothing here may emit an inline
// function with external linkage.
#define HAL_AMX_BLOCKS kBlocksAmx
#include "amx_unit.inc.h"
