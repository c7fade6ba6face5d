// Reads what handles consist of: words with blanks between. (No streams of the standard library:
// where another library has brought a libstdc++ of its own, they crash.)
#pragma once

#include <charconv>
#include <string>
#include <string_view>

namespace collectives {

class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}

  // The next word, "" at the end.
  std::string_view next() {
    const std::string_view word = rest_.substr(0, rest_.find(' '));
    rest_.remove_prefix(word.size() < rest_.size() ? word.size() + 1 : word.size());
    return word;
  }
  // The next word as a number; 0 if it is none.
  template <class Number>
  Number number() {
    const std::string_view word = next();
    Number value{};
    std::from_chars(word.data(), word.data() + word.size(), value);
    return value;
  }
  std::string rest() const { return std::string{rest_}; }

 private:
  std::string_view rest_;
};

}  // namespace collectives
