// The kernels for AMX on emulated tiles, which only tests ask for.
#define HAL_AMX_EMULATED
#define HAL_AMX_BLOCKS kBlocksAmxEmulated
#include "amx_unit.inc.h"
