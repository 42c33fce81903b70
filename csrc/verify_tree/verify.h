// The rounds of a batch of trees.
#pragma once

#include "parts/scratch.h"
#include "verify_tree/arguments.h"

namespace specens {

class TreeVerifier;

// Writes the results, whose buffers are there. Scratch memory is the pool's, without one the thread's.
void verify_tree(const TreeCall& call, const specens_verdict& verdict, ScratchPool<TreeVerifier>* pool = nullptr);

}  // namespace specens
