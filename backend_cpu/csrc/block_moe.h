// A block of experts through records of activations.
#pragma once
#include "moe_args.h"
#include "records.h"

namespace hal_cpu {

void block_moe(const MoeCall& c, const BlockLevel& level, char* out);

}  // namespace hal_cpu
