-- Take the right to seal the stream's head.
-- KEYS: meta frames offsets claim
-- ARGV: token lease_ms max_bytes max_entries
-- Answer: {epoch first last entries}, or nil
local meta, frames, offsets, claim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, lease, max_bytes, max_entries = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local OVERHEAD, DATA = 100, 14

local known = redis.call('HMGET', meta, 'epoch', 'state')
local epoch = known[1]
if not epoch or known[2] == 'archived' then return false end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local held = redis.call('HMGET', claim, 'token', 'until', 'epoch', 'first', 'last', 'entries')
if held[1] and held[3] == epoch and tonumber(held[2]) > now then
  if held[1] == token then return {epoch, held[4], held[5], tonumber(held[6])} end
  return false
end

if redis.call('XLEN', frames) == 0 then
  if redis.call('EXISTS', frames) == 1 then
    -- A commit that did not come past its trim: empty means that all that is committed is sealed.
    redis.call('DEL', claim)
    local all = redis.call('HGETALL', offsets)
    local value = {}
    for i = 1, #all, 2 do value[all[i]] = all[i + 1] end
    for field, committed in pairs(value) do
      if string.sub(field, -2) ~= ':s' and tonumber(value[field .. ':s'] or '0') < tonumber(committed) then
        redis.call('HSET', offsets, field .. ':s', committed)
      end
    end
  end
  return false
end

-- The entries' sizes are read from the entries: a copy of max_bytes is milliseconds, and a list of
-- sizes beside the stream would cost every append a write. max_entries bounds it for tiny frames.
local first, last, count, bytes, full = nil, nil, 0, 0, false
local from, step = '-', 16
while not full and count < max_entries do
  local entries = redis.call('XRANGE', frames, from, '+', 'COUNT', math.min(step, max_entries - count))
  for _, entry in ipairs(entries) do
    local size = #(entry[2][DATA] or '') + OVERHEAD
    if count > 0 and bytes + size > max_bytes then
      full = true
      break
    end
    first = first or entry[1]
    last = entry[1]
    count = count + 1
    bytes = bytes + size
  end
  if #entries < step then break end
  from = '(' .. last
  step = math.max(16, math.min(512, math.floor((max_bytes - bytes) / (bytes / count))))
end

-- DEL first: a full Redis refuses HSET as a script's first write, and only sealing can free it.
redis.call('DEL', claim)
redis.call('HSET', claim, 'token', token, 'epoch', epoch, 'first', first, 'last', last,
  'entries', count, 'bytes', string.format('%.0f', bytes), 'until', string.format('%.0f', now + lease))
return {epoch, first, last, count}
