// The rounds of a batch of chains.
#pragma once

#include "parts/scratch.h"
#include "verify_chain/arguments.h"

namespace specens {

class Verifier;

// Writes the results, whose buffers are there. Scratch memory is the pool's, without one the thread's.
void verify_chain(const ChainArguments& chain, const specens_verdict& verdict, ScratchPool<Verifier>* pool = nullptr);

}  // namespace specens
