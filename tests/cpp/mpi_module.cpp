// The MPI layer and its transport under Python, for tests/cpp/test_mpi.py alone: never installed.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "mpi.hpp"
#include "transport_mpi.hpp"

namespace py = pybind11;
using namespace collectives;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Waits with a bound, as an engine would.
template <class Ready>
void until(Ready&& ready) {
  const auto start = Clock::now();
  for (int i = 0; !ready(); ++i) {
    if (i < 200) continue;
    sched_yield();
    if (i % 1024 == 0 && seconds_since(start) > 60) throw Error(ErrorKind::deadline, "60 s");
  }
}

void send(SendPort& port, const void* data, std::size_t bytes, std::uint64_t tag) {
  char* slot = nullptr;
  until([&] { return (slot = port.acquire(bytes)) != nullptr; });
  std::memcpy(slot, data, bytes);
  port.commit({static_cast<std::uint32_t>(bytes), 0, tag});
}

Header receive(RecvPort& port, void* data) {
  Header header;
  const char* message = nullptr;
  until([&] { return (message = port.peek(&header)) != nullptr; });
  std::memcpy(data, message, header.bytes);
  port.release();
  return header;
}

// Sends and receives on all of `peers` at once, `count` messages each way on `channel`, and checks
// every byte.
void exchange(MpiTransport& t, const std::vector<int>& peers, int channel, int count,
              std::size_t bytes) {
  struct Way {
    int peer;
    SendPort* out;
    RecvPort* in;
    int sent = 0, received = 0;
  };
  auto pattern = [&](int from, int to, int i) {
    return static_cast<char>(from * 7 + to * 31 + i * 3 + channel * 101);
  };
  std::vector<Way> ways;
  for (int p : peers) {
    ways.push_back({p, &t.send_port(p, channel), &t.recv_port(p, channel)});
    ways.back().in->expect(static_cast<std::uint64_t>(count));
  }
  std::size_t open = 2 * ways.size() * static_cast<std::size_t>(count);
  until([&] {
    for (Way& w : ways) {
      char* slot = w.sent < count ? w.out->acquire(bytes) : nullptr;
      if (slot != nullptr) {
        if (reinterpret_cast<std::uintptr_t>(slot) % 64 != 0)
          throw Error(ErrorKind::system, "slot is not aligned");
        // Sizes vary around `bytes`, so that the exact length is what travels.
        const std::size_t n =
            bytes - std::min<std::size_t>(bytes, static_cast<std::size_t>(w.sent % 3));
        std::memset(slot, pattern(t.self(), w.peer, w.sent), n);
        w.out->commit({static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(w.sent), 42});
        ++w.sent;
        --open;
      }
      Header h;
      const char* message = w.in->peek(&h);
      if (message != nullptr) {
        const std::size_t n =
            bytes - std::min<std::size_t>(bytes, static_cast<std::size_t>(w.received % 3));
        const char want = pattern(w.peer, t.self(), w.received);
        bool right =
            h.bytes == n && h.tag == 42 && h.user == static_cast<std::uint32_t>(w.received);
        for (std::size_t i = 0; right && i < n; ++i) right = message[i] == want;
        if (!right)
          throw Error(ErrorKind::mismatch, "wrong message from " + std::to_string(w.peer));
        w.in->release();
        ++w.received;
        --open;
      }
    }
    return open == 0;
  });
  until([&] {
    bool flushed = true;
    for (Way& w : ways) flushed = w.out->flushed() && flushed;
    return flushed;
  });
}

// --- benchmarks: two ranks ---

// Half of the round trip, in seconds.
double pingpong(MpiTransport& t, std::size_t bytes, int rounds) {
  const int peer = 1 - t.self();
  std::vector<char> data(bytes);
  SendPort& out = t.send_port(peer, 0);
  RecvPort& in = t.recv_port(peer, 0);
  in.expect(static_cast<std::uint64_t>(rounds));
  const auto start = Clock::now();
  for (int i = 0; i < rounds; ++i) {
    if (t.self() == 0) send(out, data.data(), bytes, 1);
    receive(in, data.data());
    if (t.self() == 1) send(out, data.data(), bytes, 1);
  }
  until([&] { return out.flushed(); });
  return seconds_since(start) / rounds / 2;
}

double raw_pingpong(Mpi& mpi, MpiComm comm, std::size_t bytes, int rounds) {
  const int self = mpi.rank(comm), peer = 1 - self;
  std::vector<char> data(bytes);
  auto wait = [&](MpiRequest r) { until([&] { return mpi.test(r); }); };
  const auto start = Clock::now();
  for (int i = 0; i < rounds; ++i) {
    if (self == 0) wait(mpi.isend(data.data(), bytes, peer, 9, comm));
    wait(mpi.irecv(data.data(), bytes, peer, 9, comm));
    if (self == 1) wait(mpi.isend(data.data(), bytes, peer, 9, comm));
  }
  return seconds_since(start) / rounds / 2;
}

// Both ranks stream `total` bytes to each other from and to user memory; seconds.
double stream(MpiTransport& t, std::size_t total, bool both_ways) {
  const int peer = 1 - t.self();
  const std::size_t slot = t.slot_bytes(), messages = (total + slot - 1) / slot;
  std::vector<char> from(total, 1), to(total, 2);
  SendPort& out = t.send_port(peer, 0);
  RecvPort& in = t.recv_port(peer, 0);
  std::size_t sent = both_ways || t.self() == 0 ? 0 : messages;
  std::size_t received = both_ways || t.self() == 1 ? 0 : messages;
  if (received == 0) in.expect(messages);
  const auto start = Clock::now();
  auto part = [&](std::size_t i) { return std::min(slot, total - i * slot); };
  until([&] {
    if (sent < messages) {
      if (char* p = out.acquire(part(sent))) {
        std::memcpy(p, from.data() + sent * slot, part(sent));
        out.commit({static_cast<std::uint32_t>(part(sent)), 0, 1});
        ++sent;
      }
    }
    Header h;
    if (received < messages) {
      if (const char* p = in.peek(&h)) {
        std::memcpy(to.data() + received * slot, p, h.bytes);
        in.release();
        ++received;
      }
    }
    return sent == messages && received == messages;
  });
  until([&] { return out.flushed(); });
  return seconds_since(start);
}

// The same with plain Isend/Irecv of user memory in pieces, `depth` of each in flight.
double raw_stream(Mpi& mpi, MpiComm comm, std::size_t total, std::size_t piece, int depth,
                  bool both_ways) {
  const int self = mpi.rank(comm), peer = 1 - self;
  std::vector<char> from(total, 1), to(total, 2);
  std::vector<MpiRequest> out(static_cast<std::size_t>(depth)), in(static_cast<std::size_t>(depth));
  const std::size_t pieces = (total + piece - 1) / piece;
  const bool sends = both_ways || self == 0, receives = both_ways || self == 1;
  auto part = [&](std::size_t i) { return std::min(piece, total - i * piece); };
  std::size_t sent = 0, posted = 0;
  const auto start = Clock::now();
  until([&] {
    bool idle = true;
    if (receives) {
      MpiRequest& r = in[posted % in.size()];
      if (posted < pieces && mpi.test(r)) {
        r = mpi.irecv(to.data() + posted * piece, part(posted), peer, 9, comm);
        ++posted;
      }
      idle = posted == pieces && mpi.test_all(in);
    }
    if (sends) {
      MpiRequest& r = out[sent % out.size()];
      if (sent < pieces && mpi.test(r)) {
        r = mpi.isend(from.data() + sent * piece, part(sent), peer, 9, comm);
        ++sent;
      }
      idle = sent == pieces && mpi.test_all(out) && idle;
    }
    return idle;
  });
  return seconds_since(start);
}

}  // namespace

PYBIND11_MODULE(mpi_module, m) {
  py::register_exception<Error>(m, "Error");
  using release_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Mpi, std::shared_ptr<Mpi>>(m, "Mpi")
      .def_property_readonly("abi", [](Mpi& x) { return std::string(name_of(x.abi())); })
      .def_property_readonly("path", &Mpi::path)
      .def_property_readonly("version", &Mpi::version)
      .def_property_readonly("threads", [](Mpi& x) { return std::string(name_of(x.threads())); })
      .def_property_readonly("any_thread", &Mpi::any_thread)
      .def_property_readonly("world", &Mpi::comm_world)
      .def("initialized", &Mpi::initialized)
      .def("finalized", &Mpi::finalized)
      .def("rank", &Mpi::rank)
      .def("size", &Mpi::size)
      .def("dup", &Mpi::comm_dup, py::arg("comm"), py::arg("timeout_s") = 300.0, release_gil())
      .def("free", &Mpi::comm_free)
      .def("why_unsupported",
           [](Mpi& x, int op, int dtype) { return x.why_unsupported(Op(op), Dtype(dtype)); })
      .def("barrier", &Mpi::barrier, release_gil())
      .def("all_reduce",
           [](Mpi& x, py::buffer in, py::buffer out, std::size_t n, int dtype, int op, MpiComm c) {
             x.all_reduce(in.request().ptr, out.request(true).ptr, n, Dtype(dtype), Op(op), c);
           })
      .def("reduce_scatter",
           [](Mpi& x, py::buffer in, py::buffer out, std::size_t n, int dtype, int op, MpiComm c) {
             x.reduce_scatter(in.request().ptr, out.request(true).ptr, n, Dtype(dtype), Op(op), c);
           })
      .def("reduce",
           [](Mpi& x, py::buffer in, py::buffer out, std::size_t n, int dtype, int op, int root,
              MpiComm c) {
             x.reduce(in.request().ptr, out.request(true).ptr, n, Dtype(dtype), Op(op), root, c);
           })
      .def("broadcast", [](Mpi& x, py::buffer data, std::size_t bytes, int root,
                           MpiComm c) { x.broadcast(data.request(true).ptr, bytes, root, c); })
      .def("all_gather",
           [](Mpi& x, py::buffer in, py::buffer out, std::size_t bytes, MpiComm c) {
             x.all_gather(in.request().ptr, out.request(true).ptr, bytes, c);
           })
      .def("all_to_all",
           [](Mpi& x, py::buffer in, py::buffer out, std::size_t bytes, MpiComm c) {
             x.all_to_all(in.request().ptr, out.request(true).ptr, bytes, c);
           })
      .def("send",
           [](Mpi& x, const std::string& data, int to, int tag, MpiComm c) {
             MpiRequest r = x.isend(data.data(), data.size(), to, tag, c);
             until([&] { return x.test(r); });
           })
      .def("raw_pingpong", &raw_pingpong, release_gil())
      .def("raw_stream", &raw_stream, release_gil())
      // test_all, test_some, cancel and iprobe at work between neighbours
      .def(
          "requests",
          [](Mpi& x, MpiComm c) {
            const int n = x.size(c), r = x.rank(c), next = (r + 1) % n, last = (r + n - 1) % n;
            std::vector<int> in(8, -1), out(8);
            std::vector<MpiRequest> requests;
            for (int i = 0; i < 8; ++i) {
              out[i] = r * 100 + i;
              requests.push_back(x.irecv(&in[i], sizeof(int), last, 20 + i, c));
              requests.push_back(x.isend(&out[i], sizeof(int), next, 20 + i, c));
            }
            std::size_t done = 0;
            until([&] { return (done += x.test_some(requests).size()) == requests.size(); });
            if (!x.test_some(requests).empty())
              throw Error(ErrorKind::mismatch, "test_some of nothing");
            for (int i = 0; i < 8; ++i) {
              if (in[i] != last * 100 + i)
                throw Error(ErrorKind::mismatch, "test_some: wrong data");
            }
            for (int i = 0; i < 8; ++i) {
              requests[2 * i] = x.irecv(&in[i], sizeof(int), Mpi::any_source, 20 + i, c);
              requests[2 * i + 1] = x.isend(&out[i], sizeof(int), next, 20 + i, c);
            }
            until([&] { return x.test_all(requests); });
            MpiRequest never = x.irecv(in.data(), sizeof(int), last, 99, c);
            x.cancel(never);
            MpiStatus status;
            until([&] { return x.test(never, &status); });
            if (!status.cancelled) throw Error(ErrorKind::mismatch, "cancel: not cancelled");
            MpiRequest s = x.isend(out.data(), 3 * sizeof(int), next, 98, c);
            until([&] { return x.iprobe(Mpi::any_source, 98, c, &status); });
            if (status.source != last || status.bytes != 12)
              throw Error(ErrorKind::mismatch, "iprobe");
            MpiRequest q = x.irecv(in.data(), 12, status.source, 98, c);
            until([&] { return x.test(q, &status) && x.test(s); });
            if (status.source != last || status.bytes != 12 || status.cancelled)
              throw Error(ErrorKind::mismatch, "status");
          },
          release_gil());

  m.def("mpi", &mpi_from_loaded_library);

  py::class_<MpiTransport, std::shared_ptr<MpiTransport>>(m, "Transport")
      .def(py::init([](std::shared_ptr<Mpi> mpi, MpiComm comm, std::size_t slot_bytes, int depth,
                       std::vector<int> ranks, double timeout_s) {
             py::gil_scoped_release release;
             return std::make_shared<MpiTransport>(
                 mpi, comm,
                 MpiTransportOptions{slot_bytes, depth, std::move(ranks), timeout_s, nullptr});
           }),
           py::arg("mpi"), py::arg("comm"),
           py::arg("slot_bytes") = MpiTransportOptions{}.slot_bytes,
           py::arg("depth") = MpiTransportOptions{}.depth, py::arg("ranks") = std::vector<int>{},
           py::arg("timeout_s") = 60.0)
      .def_property_readonly("self", &MpiTransport::self)
      .def_property_readonly("size", &MpiTransport::size)
      .def_property_readonly("scratch_bytes", &MpiTransport::scratch_bytes)
      .def("exchange", &exchange, release_gil())
      .def(
          "exchange_in_threads",
          [](MpiTransport& t, const std::vector<int>& peers, int threads, int count,
             std::size_t bytes) {
            std::vector<std::thread> pool;
            std::vector<std::exception_ptr> errors(static_cast<std::size_t>(threads));
            for (int i = 0; i < threads; ++i) {
              pool.emplace_back([&, i] {
                try {
                  exchange(t, peers, i, count, bytes);
                } catch (...) {
                  errors[static_cast<std::size_t>(i)] = std::current_exception();
                }
              });
            }
            for (auto& thread : pool) thread.join();
            for (auto& e : errors) {
              if (e) std::rethrow_exception(e);
            }
          },
          release_gil())
      .def("try_send",
           [](MpiTransport& t, int peer, int channel, const std::string& data, std::uint64_t tag) {
             SendPort& port = t.send_port(peer, channel);
             char* slot = port.acquire(data.size());
             if (slot == nullptr) return false;
             std::memcpy(slot, data.data(), data.size());
             port.commit({static_cast<std::uint32_t>(data.size()), 0, tag});
             return true;
           })
      // A bare message that is to come into `into` does not any more.
      .def("withdraw",
           [](MpiTransport& t, int peer, int channel, py::buffer into) {
             const py::buffer_info memory = into.request(true);
             RecvPort& port = t.recv_port(peer, channel);
             port.expect(1);
             port.post_into(static_cast<char*>(memory.ptr),
                            static_cast<std::size_t>(memory.size * memory.itemsize));
             port.withdraw(std::chrono::steady_clock::now() + std::chrono::seconds(5));
             return !port.posted();
           })
      .def("flushed", [](MpiTransport& t, int peer,
                         int channel) { return t.send_port(peer, channel).flushed(); })
      .def("expect", [](MpiTransport& t, int peer, int channel,
                        std::uint64_t n) { t.recv_port(peer, channel).expect(n); })
      .def("try_recv",
           [](MpiTransport& t, int peer, int channel) -> py::object {
             Header h;
             RecvPort& port = t.recv_port(peer, channel);
             const char* message = port.peek(&h);
             if (message == nullptr) return py::none();
             py::bytes data(message, h.bytes);
             port.release();
             return py::make_tuple(h.tag, data);
           })
      .def("progress", &MpiTransport::progress)
      .def("poison", [](MpiTransport& t, const std::string& text) { t.poison(text); })
      .def("poisoned",
           [](MpiTransport& t) -> py::object {
             std::string text;
             int peer = -1;
             if (!t.poisoned(&text, &peer)) return py::none();
             return py::make_tuple(peer, text);
           })
      .def("pingpong", &pingpong, release_gil())
      .def("stream", &stream, release_gil());
}
