// Hints about memory that others own.
#pragma once

#include <cstddef>

namespace cula {

// Asks for huge pages behind a large area that is about to be written. An allocator that maps large areas anew hands
// out memory whose first touch costs a fault a page: by pages of 4 KiB more than the work of a memory-bound pass.
// Changes no contents; where the system has no such pages, nothing.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace cula
