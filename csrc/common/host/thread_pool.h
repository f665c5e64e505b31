// Runs independent units of work on several threads. Which thread runs a unit is not defined, so units must not
// depend on one another; then results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace cula {

// Calls body(context, unit, worker) once for each unit in [0, units), worker in [0, num_threads) being the same for no
// two calls that run at once: the index of a scratch area. Returns when all are done; the first exception is rethrown
// here. May be called from several threads at once and from a forked child.
void parallel_for_units(int64_t units, int num_threads, void (*body)(void*, int64_t unit, int worker), void* context);

template <class Body>
void parallel_for(int64_t units, int num_threads, Body&& body) {
  parallel_for_units(
      units, num_threads, [](void* context, int64_t unit, int worker) { (*static_cast<Body*>(context))(unit, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace cula
